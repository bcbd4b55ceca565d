"""Inputs that simdev makes up for models of transformers and diffusers, by their code and their documentation."""

import pytest

torch = pytest.importorskip("torch")


class Text(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Linear(width, 8))

    def forward(self, mask, features):
        features = features.masked_fill(mask, 0.0)
        return self.layers(features)


class Reads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = {}
        self.norm, self.hint = torch.nn.LayerNorm(7), torch.nn.Conv3d(3, 8, 2)
        self.text, self.words = Text(12), torch.nn.Embedding(10, 8)

    def forward(self, sample, pooled, text=None, video=None, words=None, changed=None):
        other = text.to(sample.dtype)
        changed = changed[:, 0]
        if video is not None:
            video = self.hint(video)
        return self.norm(pooled), self.text(None, features=other), self.words(words), self.norm(changed)


def test_the_layer_that_reads_an_argument_says_how_wide_it_is():
    from simdev.graphs.capture.readers import first_reader, width_read

    model = Reads()
    assert width_read(model, "text") == 12, "through another name, a part, its keyword and its layers in a row"
    assert first_reader(model, "video") is model.hint and width_read(model, "pooled") == 7
    assert width_read(model, "changed") is None, "what reaches the layer is another tensor"
    assert width_read(model, "words") is None, "numbers of words have no width"
    assert width_read(model, "sample") is None


def test_an_argument_without_a_field_is_as_wide_as_its_reader():
    from simdev.graphs.capture.diffusion_inputs import by_reader, diffusion_inputs

    def shape(name):
        made = by_reader(Reads(), name, (2, 4, 3, 16, 16))
        return None if made is None else tuple(made.shape)

    shapes = {"text": (2, 77, 12), "pooled": (2, 7), "video": (2, 3, 3, 16, 16), "changed": None}
    assert {name: shape(name) for name in shapes} == shapes
    assert by_reader(Reads(), "video", (2, 4, 16, 16)) is None, "an image is no video"
    made = diffusion_inputs(Reads(), 2, ["text"])
    assert made["pooled"].shape == (2, 7) and made["text"].shape == (2, 77, 12) and "video" not in made


def test_a_sequence_has_the_width_of_the_layer_that_reads_it():
    from simdev.graphs.capture.diffusion_inputs import diffusion_inputs

    class Sequence(torch.nn.Module):
        config = {"latent_dim": 6}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.embed, self.text = torch.nn.Linear(6, 8), torch.nn.Linear(5, 8)

        def forward(self, hidden_states, encoder_hidden_states, text_lens):
            """
            Args:
                hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, in_channels)`):
                    The noise.
            """
            return self.embed(hidden_states), self.text(encoder_hidden_states)

    shapes = {name: tuple(tensor.shape) for name, tensor in diffusion_inputs(Sequence(), 2).items()}
    assert shapes == {"hidden_states": (2, 1024, 6), "encoder_hidden_states": (2, 77, 5), "text_lens": (2,)}


def test_a_model_that_encodes_sounds_gets_a_wave():
    from simdev.graphs.capture.diffusion_inputs import diffusion_inputs

    class Sounds(torch.nn.Module):
        config = {"encoder_dim": 64}  # noqa: RUF012
        encode = None

        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv1d(2, 4, 3)

        def forward(self, sample):
            return self.first(sample)

    assert diffusion_inputs(Sounds(), 3)["sample"].shape == (3, 2, 1 << 15)


def test_frames_that_move_have_a_text_each():
    from simdev.graphs.capture.diffusion_inputs import diffusion_inputs

    class Motion(torch.nn.Module):
        config = {"in_channels": 4, "down_block_types": ("DownBlockMotion",), "cross_attention_dim": 6}  # noqa: RUF012

        def forward(self, sample, encoder_hidden_states):
            return sample

    shapes = {name: tuple(tensor.shape) for name, tensor in diffusion_inputs(Motion(), 3).items()}
    assert shapes == {"sample": (3, 4, 2, 32, 32), "encoder_hidden_states": (6, 77, 6)}
