"""The split of measured files into fitting and judging."""

import pytest

from simdev.calibrate.manifest import held_out, load_manifest, role_of, write_manifest
from simdev.errors import InvalidInput


def test_a_fifth_of_the_keys_is_held_out():
    share = sum(held_out(f"mm(f32[{i},{i}])") for i in range(4000)) / 4000
    assert 0.18 < share < 0.22


def test_the_shipped_manifest_judges_by_whole_models_and_ranks():
    manifest = load_manifest()
    assert len(manifest) > 100
    assert {entry.role for name, entry in manifest.items() if name.startswith(("neusight/labels", "param"))} == {
        "validate"
    }


def test_unlisted_and_changed_files_validate(tmp_path):
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "b.txt").write_text("2")
    write_manifest(tmp_path, [("a*", "calibrate", "x@1"), ("*.txt", "split", "y@2")], tmp_path / "m.csv")
    manifest = load_manifest(tmp_path / "m.csv")
    assert role_of(tmp_path / "a.txt", tmp_path, manifest) == "calibrate"
    assert role_of(tmp_path / "b.txt", tmp_path, manifest) == "split"
    (tmp_path / "b.txt").write_text("3")
    (tmp_path / "c.txt").write_text("2")
    assert role_of(tmp_path / "b.txt", tmp_path, manifest) == "validate"
    assert role_of(tmp_path / "c.txt", tmp_path, manifest) == "validate"


@pytest.mark.parametrize("text, field", [("a,b\n", "line 1"), ("file,sha256,role,source\nf,0,fit,s\n", "line 2")])
def test_a_wrong_manifest_is_refused(tmp_path, text, field):
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(InvalidInput) as error:
        load_manifest(tmp_path / "m.csv")
    assert error.value.field == field
