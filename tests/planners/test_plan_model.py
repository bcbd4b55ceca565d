"""Models of jobs from Hugging Face configurations: sizes are read, nothing is downloaded or executed."""

import json

import pytest

from simdev.errors import InvalidInput, Unsupported
from simdev.planners.model import find_trained

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


def written(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA_70B | changes), encoding="utf-8")
    return path


def test_a_configuration_of_llama_is_the_shipped_model(tmp_path):
    wanted = find_trained("llama3-70b")
    assert find_trained(str(written(tmp_path))) == wanted
    assert find_trained(str(tmp_path)) == wanted
    shorter = find_trained(f"{tmp_path}/config.json[length=4096]")[1]
    assert shorter == {**wanted[1], "length": 4096}


def test_an_id_is_looked_up_in_the_cache_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidInput, match="nothing is downloaded"):
        find_trained("meta-llama/Llama-3.1-70B")
    snapshot = tmp_path / "models--meta-llama--Llama-3.1-70B" / "snapshots" / "000"
    snapshot.mkdir(parents=True)
    written(snapshot)
    assert find_trained("meta-llama/Llama-3.1-70B") == find_trained("llama3-70b")


def test_the_configuration_of_transformers_itself_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.MixtralConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    model, parameters = find_trained(str(tmp_path))
    assert model.name == "mixtral" and parameters["layers"] == 4 and parameters["experts"] == 8


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"model_type": "mamba"}, Unsupported, "mamba"),
        ({"hidden_size": "8192"}, InvalidInput, "hidden_size"),
        ({"num_hidden_layers": -1}, InvalidInput, "num_hidden_layers"),
        ({"head_dim": 64}, Unsupported, "head_dim"),
        ({"attention_bias": True}, Unsupported, "bias"),
        ({"sliding_window": 1024}, Unsupported, "sliding window"),
    ],
)
def test_what_the_shipped_model_does_not_compute_is_refused(changes, error, message, tmp_path):
    with pytest.raises(error, match=message):
        find_trained(str(written(tmp_path, **changes)))


def test_a_captured_step_has_its_mesh():
    with pytest.raises(Unsupported, match="captured"):
        find_trained("step.npz")
