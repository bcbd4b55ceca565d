"""Make everything that a release consists of, in one folder.

    python tests/tools/release.py OUT           the whole folder; takes a few minutes
    python tests/tools/release.py --fill        write publication.toml into the files that hold its values
    python tests/tools/release.py --lock        write requirements-tested.txt from the packages of this environment

The folder holds the wheel and the source distribution, each board as an archive with its data sheet
(``simdev submit --release``), the page of all boards, the site, and ``SHA256SUMS`` of every file. It is made from the
commit that is checked out; uncommitted changes are refused.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from install import build

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements-tested.txt"
TABLES = ("results.csv", "plans.csv")
BOARDS = sorted({path.parent.name for name in TABLES for path in ROOT.glob(f"leaderboard/*/{name}")})
FILLED = (
    "pyproject.toml", "CITATION.cff", "docs/mkdocs.yml", "simdev/__init__.py", "README.md", "docs/pages/badges.svg",
)  # fmt: skip
BADGES = re.compile(r"(<!-- badges -->\n).*?(<!-- \. -->)", re.DOTALL)
NAME = re.compile(r"[A-Za-z0-9._-]+")


def run(*words: object, folder: Path = ROOT) -> str:
    """Run a command and return what it printed. Raises SystemExit if it fails."""
    done = subprocess.run([*map(str, words)], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def make(out: Path) -> None:
    """Make the release folder ``out``, which must not exist."""
    if run("git", "status", "--porcelain", "--untracked-files=no"):
        raise SystemExit("commit first: a release is made from a commit")
    out.mkdir(parents=True)
    simdev = (sys.executable, "-m", "simdev")
    with tempfile.TemporaryDirectory() as scratch:
        for path in build(Path(scratch)).parent.iterdir():  # wheel and source distribution, checked
            shutil.copy(path, out)
    for name in BOARDS:
        print(
            run(*simdev, "submit", f"leaderboard/{name}", "--release", "-o", out / f"board-{name}.zip").strip(),
            flush=True,
        )
    folders = [f"leaderboard/{name}" for name in BOARDS]
    run(*simdev, "leaderboard", *folders, "--html", out / "board.html")
    run(
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-q",
        "-f",
        "docs/mkdocs.yml",
        "-d",
        (out / "site").resolve(),
    )
    files = sorted(path for path in out.rglob("*") if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(out).as_posix()}" for path in files]
    (out / "SHA256SUMS").write_text("\n".join([*sums, ""]), encoding="utf-8")
    print(f"{len(files)} files in {out}")


def filled(texts: dict[str, str], values: dict) -> dict[str, str]:
    """The files that hold values of ``publication.toml``, by path, with these values."""
    pyproject = re.sub(r"\n\[project\.urls\]\n(?:\w+ = .*\n)*", "", texts["pyproject.toml"])
    urls = [f'{key.capitalize()} = "{values[key]}"' for key in ("repository", "documentation") if values[key]]
    block = "\n".join(["", "[project.urls]", *urls, ""]) if urls else ""
    pyproject = pyproject.replace("\n[project.scripts]\n", f"{block}\n[project.scripts]\n")
    citation = re.sub(r"\n(?:doi|repository-code|url|date-released): .*", "", texts["CITATION.cff"])
    released = f"\nversion: {values['version']}\ndate-released: {values['date']}"
    citation = re.sub(r"\nversion: .*", released, citation)
    names = [name.partition(",") for name in values["authors"]]
    authors = [f"  - family-names: {family.strip()}\n    given-names: {given.strip()}" for family, _, given in names]
    people = "\n".join(authors or ["  - name: simdev contributors"])
    citation = re.sub(r"authors:\n(?:  .*\n)+", f"authors:\n{people}\n", citation)
    keys = {"doi": "doi", "repository": "repository-code", "documentation": "url"}
    more = "".join(f"\n{name}: {values[key]}" for key, name in keys.items() if values[key])
    citation = re.sub(r"(\nlicense: .*)", lambda found: found[1] + more, citation)
    site = re.sub(r"\n(?:site_url|repo_url): .*", "", texts["docs/mkdocs.yml"])
    keys = {"documentation": "site_url", "repository": "repo_url"}
    more = "".join(f"\n{name}: {values[key]}" for key, name in keys.items() if values[key])
    site = re.sub(r"(\nsite_description: .*)", lambda found: found[1] + more, site)
    code = re.sub(r"\n__version__ = .*", f'\n__version__ = "{values["version"]}"', texts["simdev/__init__.py"])
    project = tomllib.loads(pyproject)["project"]
    pythons = [text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)]
    facts = {"version": values["version"], "Python": f"{pythons[0]} to {pythons[-1]}", "licence": project["license"]}
    said = ", ".join(f"{name} {value}" for name, value in facts.items())
    badges = [f"![Python {pythons[0]} to {pythons[-1]}, {project['license']}](docs/pages/badges.svg)"]
    if values["repository"]:
        checks = f"{values['repository']}/actions/workflows/checks.yml"
        badges.append(f"[![checks]({checks}/badge.svg)]({checks})")
    if values["doi"]:
        badges.append(f"[DOI {values['doi']}](https://doi.org/{values['doi']})")
    readme = BADGES.sub(lambda found: f"{found[1]}{' '.join(badges)}\n{found[2]}", texts["README.md"])
    found = (pyproject, citation, site, code, readme, drawn(facts, said))
    return dict(zip(FILLED, found, strict=True))


def drawn(facts: dict[str, str], said: str) -> str:
    """Badges as one picture with the title ``said``: each has a name on grey and a value on blue."""
    at, parts = 0, []
    for name, value in facts.items():
        for text, colour in ((name, "#555"), (value, "#1a6aa8")):
            width = 12 + round(6.4 * len(text))
            parts.append(f'<rect x="{at}" width="{width}" height="20" fill="{colour}"/>')
            parts.append(f'<text x="{at + width / 2:g}" y="14" textLength="{width - 12}">{text}</text>')
            at += width
        at += 6
    style = 'font-family="Verdana, sans-serif" font-size="11" fill="#fff" text-anchor="middle"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{at - 6}" height="20" role="img" {style}>'
    return "\n".join([head, f"<title>{said}</title>", *parts, "</svg>", ""])


def publication() -> tuple[dict[str, str], dict[str, str]]:
    """The files as they are, and as ``publication.toml`` wants them."""
    values = tomllib.loads((ROOT / "publication.toml").read_text(encoding="utf-8"))
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in FILLED}
    return texts, filled(texts, values)


def locked(extras: tuple[str, ...] = ("all", "test", "docs")) -> str:
    """The versions of every package that simdev and these extras need here, as a file of constraints for pip."""
    found, waiting = {}, [("simdev", extras)]
    seen = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            about = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # needed on another system or version of Python
            continue
        if name != "simdev":
            found[about.metadata["Name"].lower().replace("_", "-")] = about.version.partition("+")[0]
        for text in about.requires or ():
            need, _, marker = text.partition(";")
            extra = re.search(r"""extra == ["']([\w-]+)["']""", marker)
            if extra and extra[1] not in wanted:
                continue
            inner = re.search(r"\[([^]]+)\]", need)
            waiting.append((NAME.match(need)[0], tuple(inner[1].split(",")) if inner else ()))
    head = f"# Versions under which the tests passed with Python {sys.version_info.major}.{sys.version_info.minor}:\n"
    head += "#     pip install -c requirements-tested.txt '.[all]'\n"
    return head + "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, help="the folder to make")
    parser.add_argument("--fill", action="store_true", help="write publication.toml into the files")
    parser.add_argument("--lock", action="store_true", help=f"write {LOCK.name}")
    options = parser.parse_args()
    if options.fill:
        for name, text in publication()[1].items():
            (ROOT / name).write_text(text, encoding="utf-8")
    if options.lock:
        LOCK.write_text(locked(), encoding="utf-8")
    if options.out:
        make(options.out)
    elif not options.fill and not options.lock:
        parser.error("name the folder to make")


if __name__ == "__main__":
    main()
