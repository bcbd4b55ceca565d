"""Documentation pages that are generated from the project itself when the site is built.

They are a page for each placer, planner, model and workload, the machines, the commands, the Python reference, and the
files of the repository that are documentation already, such as the execution model.
"""

from __future__ import annotations

import base64
import csv
import functools
import importlib
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
FILES = {
    "execution-model.md": "simdev/sim/MODEL.md",
    "columns.md": "leaderboard/README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "releasing.md": "RELEASING.md",
}
# The modules that users import, by room; an empty name is the room itself.
PUBLIC = {
    "problem": ("graph", "graph_file", "topology", "costs", "problem", "placement"),
    "analysis": ("levels", "coarsen", "bounds"),
    "graphs": ("workload", "importers"),
    "sim": ("", "schedule"),
    "placers": ("placer", "budget", "score", "registry", "testing"),
    "parallel": ("models", "plan"),
    "planners": ("planner", "job", "budget", "testing"),
    "bench": ("rows", "score", "verify"),
    "report": ("explain",),
    "integrations": ("torch_map",),
    "errors": ("",),
}
# shown together on one page
BOARDS = ("standard", "order", "best-known", "throughput", "inference", "machines", "parallel")
RUN = ("tutorial", "howto/model", "howto/machine", "howto/placer", "howto/apply", "python-api", "agents")
HELP_WIDTH = 72  # characters that a column of the site shows without a scroll bar


def on_files(files, config):
    pages = {name: linked_pages((ROOT / path).read_text(encoding="utf-8")) for name, path in FILES.items()}
    pages |= {
        **placer_pages(),
        **workload_pages(),
        "machines.md": machines_page(),
        "commands.md": commands_page(),
        "boards.md": boards_page(),
        **planner_pages(),
        **model_pages(),
        **python_pages(),
    }
    pages |= gallery()
    for name, content in sorted(pages.items()):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Each page ends with what checks it, and the commit that it was built from."""
    name = page.file.src_uri
    if name in ("gallery.md",) or name.startswith(("placers/", "planners/", "models/", "workloads/", "python/")):
        checked = "this page is generated from the code and the boards"
    elif name.removesuffix(".md") in RUN:
        checked = "the examples of this page are executed by `tests/test_docs.py`"
    elif name.endswith("-record.md"):
        checked = "this page is a record, and its figures are not checked again"
    else:
        checked = "the commands of this page are compared with the program, and its marked figures with the boards"
    return f"{markdown}\n\n---\n\n*Last check at the build of this site, {built_from()}: {checked}.*\n"


@functools.cache
def built_from() -> str:
    """The commit that the site is built from, with its date; without a repository, the version."""
    from simdev import __version__

    command = ["git", "log", "-1", "--format=commit %h of %cs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.strip() if done.returncode == 0 else f"version {__version__}"


def on_post_build(config):
    """The boards as one page of the site, with its pictures and placements beside it."""
    from simdev.report.page import write_page

    write_page([ROOT / "leaderboard" / name for name in BOARDS], Path(config["site_dir"]) / "board.html")


def boards_page() -> str:
    from simdev.bench.plan_rows import read_folder

    text = [
        "# The boards",
        "",
        '<a class="md-button" href="board.html">Open the boards</a>',
        "",
        "One page shows every board: rankings, the gap of each case to its proven bound, and two pictures of each",
        "case. You can sort, filter and download. The address holds what you see. The rows of a board are in",
        "`leaderboard/` of the repository.",
        "",
        "| board | what is compared | rows | machines |",
        "|---|---|--:|---|",
    ]
    about = {
        "standard": "placements of one training step",
        "order": "the same, with the order of ops chosen",
        "best-known": "for each case of both, under either order, the shortest step of any search",
        "throughput": "pipelines of 32 microbatches",
        "inference": "one query, and a stream of queries",
        "machines": "placements on other machines",
        "parallel": "plans of whole training jobs",
    }
    for name in BOARDS:
        rows = read_folder(ROOT / "leaderboard" / name)
        machines = sorted({getattr(row, "topology", None) or row.cluster for row in rows})
        text.append(f"| {name} | {about[name]} | {len(rows):,} | {', '.join(machines)} |")
    text += ["", "`simdev leaderboard FOLDER --html board.html` makes such a page of your own results.", ""]
    return "\n".join(text)


def on_page_content(html, page, config, files):
    """Cross-references of docstrings (``:func:`name```) as code: Markdown leaves the word before it standing."""
    return re.sub(
        r":(?:py:)?(?:func|class|meth|mod|data|attr|exc|obj):<code>~?([^<]*)</code>", r"<code>\1</code>", html
    )


def source_file(module) -> str:
    """Where a module lies in the repository, wherever it is installed."""
    name = module.__name__
    for shelf in ("baselines", "workloads"):
        name = name.replace(f"simdev.{shelf}", shelf)
    return name.replace(".", "/") + ".py"


def linked_pages(text: str) -> str:
    """Links between files of the repository as links between pages of the site."""
    for name, path in FILES.items():
        text = text.replace(f"]({path})", f"]({name})")
    return text.replace("](docs/pages/", "](")


def ranking() -> dict[str, dict[str, str]]:
    path = ROOT / "leaderboard" / "standard" / "ranking.csv"
    with open(path, encoding="utf-8", newline="") as file:
        return {line["placer"]: line for line in csv.DictReader(file) if line["params"] == "{}"}


def prose(text: str | None) -> str:
    """A docstring as Markdown: cross-references become code."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", inspect.cleandoc(text or "")).replace("``", "`")


def first_sentence(function, module) -> str:
    """The first sentence of a placer's docstring, or of its file's if the function has none."""
    text = prose(function.__doc__ or module.__doc__).split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.])\s", text)[0].rstrip(".").replace("|", "\\|")


def placer_pages() -> dict[str, str]:
    from simdev.placers import registry

    places, pages, lines = ranking(), {}, []
    for name, spec in registry.placers().items():
        module = sys.modules[spec.function.__module__]
        where = source_file(module)
        facts = [f"version {spec.version}", f"family {spec.family}"]
        facts += ["evaluates placements with the simulator"] if spec.searches else []
        facts += [] if spec.memory_aware else ["ignores memory by design"]
        facts += [] if spec.repeatable else ["its solver may stop by the clock"]
        facts += [f"needs {', '.join(spec.needs)}"] if spec.needs else []
        text = [f"# {name}", "", prose(module.__doc__), "", "; ".join(facts) + f". In `{where}`.", ""]
        text += [f"**Source.** {spec.source}", ""] if spec.source else []
        text += ["## What it does, and where it departs from its source", "", prose(spec.function.__doc__), ""]
        if spec.defaults:
            text += ["## Parameters", "", "| name | default |", "|---|---|"]
            text += [f"| `{key}` | `{shown(value)}` |" for key, value in spec.defaults.items()] + [""]
        if name in places:
            row = places[name]
            standing = f"Place {row['place']}" if row["place"] else "No place: it did not run every case"
            text += [
                "## On the standard leaderboard",
                "",
                f"{standing}. The step time is {float(row['geomean_ratio_to_best']):.3f} times the best "
                f"known one (geometric mean). The placement fits in {row['solved']} of {row['cases']} cases and "
                f"is the best in {row['wins']}.",
                "",
            ]
        text += ["```sh", f"simdev simulate inception-v3 p100x4 --placer {name}", "```", ""]
        pages[f"placers/{name}.md"] = "\n".join(text)
        rank = int(places[name]["place"] or 0) or None if name in places else None
        score = f"{float(places[name]['geomean_ratio_to_best']):.3f}" if name in places else ""
        cells = [str(rank or ""), f"[{name}]({name}.md)", spec.family, score, first_sentence(spec.function, module)]
        lines.append((rank or len(places) + 1, f"| {' | '.join(cells)} |"))
    head = [
        "# Placers",
        "",
        "The placers stand in the order of the standard leaderboard. The ratio is the step time over the best known",
        f"one, as a geometric mean over {max(int(line['cases']) for line in places.values())} cases.",
        "",
    ]
    head += ["| place | placer | family | ratio | what it does |", "|--:|---|---|--:|---|"]
    pages["placers/index.md"] = "\n".join([*head, *(line for _, line in sorted(lines)), ""])
    return pages


def shown(value: object) -> str:
    """The default of a parameter, as text that is not empty."""
    return '""' if value == "" else str(value)


def planner_pages() -> dict[str, str]:
    from simdev.bench import score
    from simdev.bench.plan_rows import as_row, read_folder
    from simdev.planners import planners

    rows = [as_row(row) for row in read_folder(ROOT / "leaderboard" / "parallel")]
    places = {line["placer"]: line for line in score.ranking(rows)}
    pages, lines = {}, []
    known = planners()
    for name in [*(name for name in places if name in known), *sorted(known.keys() - places.keys())]:
        spec = known[name]
        module = sys.modules[spec.function.__module__]
        text = [f"# {name}", "", prose(module.__doc__), "", f"Version {spec.version}. In `{source_file(module)}`.", ""]
        text += [f"**Source.** {spec.source}", ""] if getattr(spec, "source", "") else []
        text += ["## What it does", "", prose(spec.function.__doc__), ""] if spec.function.__doc__ else []
        line = places.get(name)
        if line:
            standing = f"Place {line['place']}" if line["place"] else "No place: it did not run every job"
            text += [
                "## On the board of planners",
                "",
                f"{standing}. It ran {line['cases']} of {line['instances']} jobs and found a plan that fits for "
                f"{line['solved']}. The step time is {float(line['geomean_ratio_to_best']):.3f} times the best known "
                "one on average.",
                "",
            ]
        text += ["```sh", f'simdev plan llama3-8b "dgx-h100[nodes=2]" --batch 64 --planner {name}', "```", ""]
        pages[f"planners/{name}.md"] = "\n".join(text)
        cells = [line["place"], line["cases"], f"{float(line['geomean_ratio_to_best']):.3f}"] if line else ["", "", ""]
        said = first_sentence(spec.function, module)
        lines.append(f"| {cells[0]} | [{name}]({name}.md) | {cells[2]} | {cells[1]} | {said} |")
    head = [
        "# Planners",
        "",
        "Planners choose the parallelism of a training job. They stand in the order of their board; the ratio",
        "is the step time over the best known one, on average over the jobs that a planner ran.",
        "",
        "| place | planner | ratio | jobs | what it does |",
        "|--:|---|--:|--:|---|",
    ]
    pages["planners/index.md"] = "\n".join([*head, *lines, ""])
    return pages


def model_pages() -> dict[str, str]:
    """A page for each model that plans know, with its sizes, its best known plans and its published steps."""
    from simdev.bench.plan_rows import read_folder
    from simdev.parallel.models import parallel_models

    rows = read_folder(ROOT / "leaderboard" / "parallel")
    with open(ROOT / "leaderboard" / "fidelity" / "published-plans.csv", encoding="utf-8", newline="") as file:
        published = list(csv.DictReader(file))
    pages, lines = {}, []
    for name, model in parallel_models().items():
        module = sys.modules[model.function.__module__]
        sizes = [f"{name}-{size}" for size in model.sizes] or [name]
        text = [f"# {name}", "", prose(module.__doc__), "", f"In `{source_file(module)}`.", ""]
        text += [f"**Source.** {model.source}", ""] if model.source else []
        axes = ", ".join(f"`{axis}`" for axis in ("pp", *model.axes))
        text += ["## Sizes and parameters", "", f"Mesh axes: {axes}. FLOPs are those of the model for one sequence,"]
        text += ["forward and backward, without recomputation: what MFU is measured against.", ""]
        text += sizes_table(model)
        text += ["", "Other parameters, with their defaults, in brackets behind the name:", ""]
        own = [key for key in model.defaults if all(key not in size for size in model.sizes.values())]
        text += [f"`{sizes[0]}[{','.join(f'{key}={model.defaults[key]}' for key in own)}]`", ""]
        text += best_plans([row for row in rows if row.model in sizes])
        text += published_steps([line for line in published if re.match(rf"'?{name}\b", line["command"])])
        data = "dp_shard" if "dp_shard" in model.axes else "dp_replicate"
        text += ["```sh", f"simdev simulate-plan {sizes[0]} dgx-a100 --mesh {data}=8", "```", ""]
        pages[f"models/{name}.md"] = "\n".join(text)
        lines.append(f"| [{name}]({name}.md) | {', '.join(model.sizes)} | {axes} | {model.source} |")
    head = [
        "# Models to plan",
        "",
        "`simdev plan` and `simdev simulate-plan` know these models by name. A function of your own, a model of",
        "Hugging Face and a plain training step work as well: [plan your own model](../own-model.md).",
        "",
        "| model | sizes | mesh axes | source |",
        "|---|---|---|---|",
    ]
    pages["models/index.md"] = "\n".join([*head, *lines, ""])
    return pages


def sizes_table(model) -> list[str]:
    """The published sizes of a parallel model as a table: the parameters that differ, and the FLOPs of a sequence."""
    varied = list(dict.fromkeys(key for size in model.sizes.values() for key in size))
    table = [f"| {' | '.join(['size', *varied, 'TFLOP'])} |", f"|---|{'--:|' * len(varied)}--:|"]
    for size in model.sizes or {"": {}}:
        parameters = model.parameters(size, {})
        cells = [f"{parameters[key]:,}" if isinstance(parameters[key], int) else parameters[key] for key in varied]
        name = f"{model.name}-{size}" if size else model.name
        flops = model.flops(parameters) / 1e12
        digits = max(0, 2 - math.floor(math.log10(flops)))  # three figures
        table.append(f"| `{name}` | {''.join(f'{cell} | ' for cell in cells)}{flops:,.{digits}f} |")
    return table


def best_plans(rows: list) -> list[str]:
    """The best plan of each job of the board of planners, and every planner whose plan is as fast."""
    best: dict[tuple, list] = {}
    for row in sorted((row for row in rows if row.step_ns is not None), key=lambda row: (row.step_ns, row.planner)):
        first = best.setdefault((row.model, row.cluster, row.batch), [])
        if not first or row.step_ns == first[0].step_ns:
            first.append(row)
    if not best:
        return []
    text = ["## Best known plans", "", "Of the board of planners (`leaderboard/parallel`), with software `eager`.", ""]
    text += ["| model | cluster | sequences | plan | step s | found by |", "|---|---|--:|---|--:|---|"]
    for (name, cluster, batch), (row, *others) in sorted(best.items()):
        cells = name, cluster, f"{batch:,}", f"`{row.choice}`", f"{row.step_ns / 1e9:.3f}"
        text.append(f"| {' | '.join(cells)} | {', '.join(dict.fromkeys(one.entry for one in (row, *others)))} |")
    return [*text, ""]


def published_steps(rows: list[dict[str, str]]) -> list[str]:
    """Measured steps that papers and projects report, and what simdev predicts for them."""
    if not rows:
        return []
    text = ["## Published steps", "", "What others measured, and what simdev predicts: [fidelity](../fidelity.md).", ""]
    text += ["| source | GPUs | measured s | simulated s | error |", "|---|--:|--:|--:|--:|"]
    for line in rows:
        measured, simulated = float(line["measured_s"]), float(line["simulated_s"])
        error = f"{100 * (simulated / measured - 1):+.1f} %"
        text.append(f"| {line['source']} | {int(line['gpus']):,} | {measured:.3f} | {simulated:.3f} | {error} |")
    return [*text, ""]


def workload_pages() -> dict[str, str]:
    from simdev.placers import registry
    from simdev.report import describe

    pages, lines = {}, []
    for name, spec in registry.workloads().items():
        module = sys.modules[spec.function.__module__]
        text = [f"# {name}", "", prose(module.__doc__), "", prose(spec.function.__doc__), ""]
        text += [f"**Source.** {spec.source}", ""] if spec.source else []
        text += ["## Parameters", "", "| name | default |", "|---|---|"]
        text += [f"| `{key}` | `{shown(value)}` |" for key, value in spec.defaults.items()] + [""]
        if spec.published:
            text += ["## Published figures", "", "| what | figure |", "|---|--:|"]
            text += [f"| {key.replace('_', ' ')} | {value:,} |" for key, value in spec.published.items()] + [""]
        if registry.graph_path(name).is_file():
            summary = describe.summarise_graph(registry.load_workload(name))
            text += ["## The graph", "", "```text", describe.graph_text(summary), "```", ""]
            lines.append(
                f"| [{name}]({name}.md) | {spec.family} | {summary['ops']:,} | {summary['flops'] / 1e12:.3f} |"
            )
        else:
            lines.append(f"| [{name}]({name}.md) | {spec.family} | | |")
        pages[f"workloads/{name}.md"] = "\n".join(text)
    head = ["# Workloads", "", "Each workload is one training step: forward, loss, backward and update.", ""]
    pages["workloads/index.md"] = "\n".join(
        [*head, "| workload | family | ops | TFLOP |", "|---|---|--:|--:|", *lines, ""]
    )
    return pages


def machines_page() -> str:
    from simdev.problem.topology import load_topology, topology_names
    from simdev.report import describe

    text = ["# Machines", "", "These topologies ship with simdev. Bandwidth and latency are per direction.", ""]
    for name in topology_names():
        text_of_topology = describe.topology_text(describe.describe_topology(load_topology(name)))
        text += [f"## {name}", "", "```text", text_of_topology, "```", ""]
    return "\n".join(text)


def commands_page() -> str:
    import typer

    from simdev.cli.app import TOPICS
    from simdev.cli.main import app

    group = typer.main.get_command(app)
    codes = "0 success, 1 a check found differences, 2 wrong input (one sentence on stderr), 3 runs were lost"
    text = [
        "# Commands",
        "",
        f"Exit codes: {codes}, 130 interrupted. Commands that only read print JSON if `--json` is given.",
        "",
    ]

    def add(name: str, command, parent) -> None:
        with command.context_class(command, info_name=name.rpartition(" ")[2], parent=parent) as at:
            at.terminal_width = at.max_content_width = HELP_WIDTH
            text.extend([f"### simdev {name}", "", "```text", command.get_help(at), "```", ""])
            for inner, entry in sorted(getattr(command, "commands", {}).items()):
                add(f"{name} {inner}", entry, at)

    for topic in TOPICS:
        text += [f"## {topic}", ""]
        for name, command in sorted(group.commands.items()):
            if (command.rich_help_panel or TOPICS[0]) == topic:
                with command.context_class(group, info_name="simdev") as parent:
                    add(name, command, parent)
    return "\n".join(text)


def gallery() -> dict[str, str | bytes]:
    """The pictures of the notebooks, as their stored outputs hold them, and a page that shows them."""
    pages: dict[str, str | bytes] = {}
    text = ["# Gallery", "", "These pictures come from the notebooks in `notebooks/`, which run on a laptop.", ""]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        title = "".join(cells[0]["source"]).splitlines()[0].lstrip("# ")
        text += [f"## {title}", "", f"From `notebooks/{path.name}`.", ""]
        said = title
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "markdown":
                said = re.split(r"(?<=[.])\s", " ".join("".join(cell["source"]).split()))[0].lstrip("# ")
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    name = f"{path.stem}-{number}.png"
                    pages[f"gallery/{name}"] = base64.b64decode(output["data"]["image/png"])
                    text += [f"![{said}](gallery/{name})", ""]
    pages["gallery.md"] = "\n".join(text)
    return pages


def python_pages() -> dict[str, str]:
    """A page for each room with public modules, whose docstrings are the reference."""
    pages, lines = {}, []
    for room, modules in PUBLIC.items():
        package = importlib.import_module(f"simdev.{room}")
        title = "simdev.errors" if room == "errors" else f"simdev.{room}"
        names = [f"simdev.{room}.{module}" if module else f"simdev.{room}" for module in modules]
        pages[f"python/{room}.md"] = "\n".join([f"# {title}", "", *(f"::: {name}\n" for name in names)])
        summary = prose(package.__doc__).split("\n\n")[0].replace("\n", " ")
        lines.append(f"| [{title}]({room}.md) | {summary} |")
    head = [
        "# Python reference",
        "",
        "The public modules by room. Docstrings state shapes, dtypes, units and errors.",
        "",
    ]
    pages["python/index.md"] = "\n".join([*head, "| room | what it holds |", "|---|---|", *lines, ""])
    return pages
