"""Inputs that simdev makes up for models of transformers and diffusers, by their code and their documentation."""

import sys

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


def test_what_gets_an_axis_for_tokens_in_the_code_has_none():
    from simdev.graphs.capture.readers import gets_tokens
    from simdev.graphs.capture.transformers_inputs import _features

    class Embeds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.state, self.noise, self.goal = (torch.nn.Linear(5, 8) for _ in range(3))

        def forward(self, state, noise, goal):
            state_embeds = self.state(state)
            noise_embeds = self.noise(noise)
            goal_embeds = self.goal(goal)
            return torch.cat([state_embeds[:, None, :], noise_embeds, goal_embeds.unsqueeze(1)], 1)

    class Acts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = Embeds()

        def forward(self, state, noise, goal):
            return self.embed(state, noise, goal=goal)

    assert gets_tokens(Acts(), "state") and gets_tokens(Acts(), "goal")
    assert not gets_tokens(Acts(), "noise") and not gets_tokens(Acts(), "other")
    shapes = {name: tuple(made.shape) for name, made in _features(Acts(), None, ["state", "noise"], 2).items()}
    assert shapes == {"state": (2, 5), "noise": (2, 77, 5)}


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


def test_an_encoded_image_has_the_channels_that_are_decoded(monkeypatch):
    """The first field counts what the model computes of an image, such as its frequencies."""
    diffusers = pytest.importorskip("diffusers")
    from simdev.graphs.capture.packages import package_step

    class Waves(torch.nn.Module):
        encode = None

        def __init__(self):
            super().__init__()
            self.config, self.first = {"in_channels": 6, "out_channels": 3}, torch.nn.Conv2d(6, 8, 3)

        def forward(self, sample):
            return self.first(torch.cat([sample, sample.sin()], dim=1))

    class Plain(Waves):
        def forward(self, sample):
            return self.first(sample)

    for model, channels in ((Waves, 3), (Plain, 6)):
        monkeypatch.setattr(diffusers, "WavesModel", model, raising=False)
        assert package_step("diffusers:WavesModel")[0]().inputs[0]["sample"].shape == (1, channels, 128, 128)


def test_code_may_look_at_the_inputs_of_a_step(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    from simdev.graphs.capture import capture_package

    class Looks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.first = {"in_channels": 4}, torch.nn.Conv2d(4, 8, 3)

        def forward(self, sample):
            return self.first(sample) * 0 if torch.all(sample == 0) else self.first(sample)

    monkeypatch.setattr(diffusers, "LooksModel", Looks, raising=False)
    graph = capture_package("diffusers:LooksModel", batch=2)
    assert "input()->f32[2,4,32,32]" in graph.signatures and "values" not in graph.meta
    assert "mul" not in graph.kinds, "the image is not all zeros"


# transformers --------------------------------------------------------------------------------------------------


class Takes(torch.nn.Module):
    main_input_name = "input_ids"

    def forward(self, input_ids, labels=None):
        return input_ids


def test_a_tuple_that_a_configuration_makes_stays_one():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import make_lists, package_step

    reformer, convolutions = transformers.ReformerConfig(), transformers.ConvNextConfig(hidden_sizes=(4, 8))
    make_lists(reformer)
    make_lists(convolutions)
    assert isinstance(reformer.axial_pos_shape, tuple), "its model adds it to a tuple"
    assert convolutions.hidden_sizes == [4, 8]
    sizes = "axial_pos_shape=[4,4],axial_pos_embds_dim=[4,4],hidden_size=8,num_attention_heads=2,vocab_size=20"
    model = package_step(f'transformers:ReformerModel[{sizes},attn_layers=["local"]]')[0]().model
    assert model.config.axial_pos_shape == (4, 4), "a user's list is one, too"


def test_a_text_has_as_many_tokens_as_positions_on_axes():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    config = transformers.ReformerConfig(axial_pos_shape=(4, 6), vocab_size=40)
    assert hf_inputs(Takes(), config, 2, None)["input_ids"].shape == (2, 24)
    assert hf_inputs(Takes(), config, 2, 16)["input_ids"].shape == (2, 16)


def test_a_text_is_no_longer_than_a_configuration_allows():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    config = transformers.GPT2Config(max_text_len=20, vocab_size=40)
    assert hf_inputs(Takes(), config, 2, None)["input_ids"].shape == (2, 20)
    assert hf_inputs(Takes(), config, 2, 30)["input_ids"].shape == (2, 30), "a user's length is kept"


def test_a_question_ends_at_a_mark():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    config = transformers.LongformerConfig(sep_token_id=5, vocab_size=9, max_position_embeddings=64)
    for name, shape in (("ForQuestionAnswering", (3, 64)), ("ForMultipleChoice", (3, 2, 64))):
        ids = hf_inputs(type(f"Takes{name}", (Takes,), {})(), config, 3, 64)["input_ids"]
        assert ids.shape == shape and ((ids == 5).sum(-1) == 3).all()


def test_the_size_of_images_may_lie_deep_inside_a_configuration():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import _image_shape

    backbone = transformers.SwinConfig(image_size=96, num_channels=5)
    outer = transformers.PretrainedConfig(vision_config=transformers.PretrainedConfig(backbone_config=backbone))
    assert _image_shape(Takes(), outer) == (3, 96, 96)


def test_a_decoder_with_the_cache_of_its_encoder_keeps_none():
    pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import package_step

    sizes = "encoder_layers=1,decoder_layers=2,d_model=8,decoder_attention_heads=2,decoder_ffn_dim=8,vocab_size=20"
    target = f"transformers:BlenderbotForCausalLM[{sizes}]"
    step = package_step(target, length=8)[0]()
    assert step.loss(step.model, *step.inputs).requires_grad
    assert package_step(target, mode="prefill", length=8)[0]().model.config.use_cache


def test_the_only_language_is_that_of_the_text():
    pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import package_step

    small = "num_hidden_layers=1,hidden_size=8,num_attention_heads=2,intermediate_size=8,vocab_size=20"
    assert package_step(f"transformers:XmodModel[{small}]")[0]().model.config.default_language == "en_XX"
    two = package_step(f'transformers:XmodModel[{small},languages=["en_XX","de_DE"]]')[0]()
    assert two.model.config.default_language is None, "a user chooses"


def test_a_transducer_reads_a_blank_before_its_text():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import made_up_inputs

    class Transducer(torch.nn.Module):
        main_input_name, config = "input_features", transformers.PretrainedConfig(blank_token_id=21, num_mel_bins=6)

        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(6, 4)

        def forward(self, input_features, decoder_input_ids=None, labels=None):
            return self.first(input_features)

    inputs = made_up_inputs(Transducer(), 2, None)
    assert inputs["input_features"].shape == (2, 1000, 6)
    assert (inputs["decoder_input_ids"][:, 0] == 21).all()
    assert (inputs["decoder_input_ids"][:, 1:] == inputs["labels"]).all()


def test_frames_that_a_text_stands_for_have_features_as_labels():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import made_up_inputs

    class Spoken(torch.nn.Module):
        main_input_name = "input_ids"
        config = transformers.PretrainedConfig(
            vocab_size=20, audio_bos_token_id=7, audio_latent_token_id=8, latent_dim=5
        )

        def forward(self, input_ids, labels=None):
            """
            labels (`torch.Tensor` of shape `(batch_size, num_frames, latent_dim)`, *optional*):
                Targets.
            """
            return input_ids

    inputs = made_up_inputs(Spoken(), 2, 10)
    assert inputs["labels"].shape == (2, 5, 5) and inputs["labels"].is_floating_point()
    ids = inputs["input_ids"]
    assert (ids[:, 4] == 7).all() and (ids[:, 5:] == 8).all() and not ((ids[:, :4] == 7) | (ids[:, :4] == 8)).any()


def test_a_spectrogram_beside_its_wave_is_as_long():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Hears(torch.nn.Module):
        main_input_name = "input_values"
        config = transformers.PretrainedConfig(hop_length=320, feature_size=6)

        def forward(self, input_values, input_features):
            frames = input_values.shape[-1] // 320
            return torch.cat([input_features.transpose(1, 2), torch.zeros(len(input_values), 1, frames)], dim=1)

    made = hf_inputs(Hears(), Hears.config, 2, None)
    assert made["input_values"].shape[-1] == 16_000 and made["input_features"].shape == (2, 50, 6)


def test_features_are_as_wide_as_a_convolution_behind_its_padding_reads():
    from simdev.graphs.capture.transformers_inputs import _features

    class Causal(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv = torch.nn.Conv1d(width, 4, 3)

        def forward(self, hidden_states, padding_cache=None):
            if padding_cache is not None:
                hidden_states = padding_cache.update(hidden_states)
            else:
                hidden_states = torch.nn.functional.pad(hidden_states, (2, 0))
            return self.conv(hidden_states)

    class Codec(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.stem = Causal(width)

        def forward(self, hidden_states):
            return self.stem(hidden_states)

    for width, length in ((6, 77), (1, 16_000)):  # features, and a sound
        assert _features(Codec(width), None, ["hidden_states"], 2)["hidden_states"].shape == (2, width, length)


def test_a_single_sample_and_the_size_of_a_prompt_are_tried_where_others_fail():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Asks(torch.nn.Module):
        main_input_name = "pixel_values"

        def __init__(self, config):
            super().__init__()
            self.config = config

        def forward(self, pixel_values):
            if pixel_values.shape[-1] != 32:
                raise ValueError

    class AsksForOne(Asks):
        def forward(self, pixel_values):
            batch, frames, channels, height, width = pixel_values.shape
            if batch != 1:
                raise ValueError

    prompt = transformers.CLIPVisionConfig(image_size=32)
    vision = transformers.PretrainedConfig()
    config = transformers.PretrainedConfig(vision_config=vision, prompt_encoder_config=prompt)
    model = Asks(config)
    assert hf_inputs(model, config, None, None)["pixel_values"].shape == (8, 3, 32, 32)
    config = transformers.PretrainedConfig(num_frames=2, image_size=8)
    assert hf_inputs(AsksForOne(config), config, None, None)["pixel_values"].shape == (1, 2, 3, 8, 8)


def test_what_ran_on_fake_tensors_is_not_run_for_real():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.graphs.capture.transformers_inputs import _runs_with

    class Counts(torch.nn.Module):
        config, runs = "known to run on fake tensors", 0

        def forward(self, pixel_values):
            self.runs += 1

    model = Counts()
    with FakeTensorMode():
        fake = torch.randn(2, 3)
    assert _runs_with(model, {"pixel_values": fake}) and _runs_with(model, {"pixel_values": torch.randn(2, 3)})
    assert model.runs == 1
    assert _runs_with(model, {"pixel_values": torch.randn(2, 4)}) and model.runs == 2, "of another shape"


def test_points_are_matched_in_pairs_of_images():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class MatchesForKeypointMatching(torch.nn.Module):
        main_input_name = "pixel_values"

        def forward(self, pixel_values):
            return pixel_values

    class Asks(torch.nn.Module):
        main_input_name = "pixel_values"

        def forward(self, pixel_values):
            if pixel_values.ndim != 5 or pixel_values.size(1) != 2:
                raise ValueError

    config = transformers.PretrainedConfig(image_size=8)
    for model in (MatchesForKeypointMatching(), Asks()):
        assert hf_inputs(model, config, 2, None)["pixel_values"].shape == (2, 2, 3, 8, 8)


def test_images_have_the_axes_that_the_code_takes_apart():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.readers import axes_read
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Tiles(torch.nn.Module):
        main_input_name = "pixel_values"

        def features(self, images):
            rows, num_media, num_tiles, channels, height, width = images.shape
            return images

        def forward(self, pixel_values, ratio_ids, ratio_mask):
            """
            ratio_ids (`torch.Tensor` of shape `(batch_size, max_num_images)`): Which ratio.
            ratio_mask (`torch.Tensor` of shape `(batch_size, max_num_images, max_num_tiles)`): Which tiles.
            """
            return self.features(images=pixel_values.float())

    config = transformers.PretrainedConfig(image_size=8, max_num_tiles=4)
    made = hf_inputs(Tiles(), config, 2, None)
    assert {name: tuple(value.shape) for name, value in made.items()} == {
        "pixel_values": (2, 1, 4, 3, 8, 8), "ratio_ids": (2, 1), "ratio_mask": (2, 1, 4)
    }  # fmt: skip
    assert made["ratio_ids"].dtype is torch.int64, "numbers of rows in a table"

    class Plain(Tiles):
        def features(self, images):
            count, channels, height, width = images.size()
            return images

    assert axes_read(Plain(), "pixel_values") == ["count", "channels", "height", "width"]
    assert hf_inputs(Plain(), config, 2, None)["pixel_values"].shape == (2, 3, 8, 8)


def test_images_that_the_code_joins_with_the_samples_have_an_axis_for_their_number():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Joins(torch.nn.Module):
        main_input_name = "pixel_values"

        def forward(self, pixel_values, input_ids, image_mask=None, camera_mask=None, other_mask=None):
            # image_mask:  [batch_size,  text_seq_length, num_images   ]
            images = pixel_values.flatten(0, 1).float()
            batch_size, max_num_cameras = camera_mask.shape
            rows, width = other_mask.shape
            return images

    config = transformers.PretrainedConfig(image_size=8, vocab_size=30, max_position_embeddings=16)
    made = hf_inputs(Joins(), config, 2, None, ["image_mask", "camera_mask", "other_mask"])
    assert {name: tuple(value.shape) for name, value in made.items()} == {
        "pixel_values": (2, 1, 3, 8, 8), "input_ids": (2, 16), "image_mask": (2, 16, 1), "camera_mask": (2, 1)
    }, "nothing says how wide the last mask is"  # fmt: skip
    assert made["image_mask"].all()

    class AsItIs(Joins):
        def forward(self, pixel_values):
            if pixel_values.dim() == 5:
                pixel_values = pixel_values.flatten(0, 1)
            return pixel_values

    assert hf_inputs(AsItIs(), config, 2, None)["pixel_values"].shape == (2, 3, 8, 8)


def test_what_a_mask_masks_goes_with_it():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Sees(torch.nn.Module):
        main_input_name = "input_ids"

        def forward(self, input_ids, attention_mask=None, visual_embeds=None, visual_attention_mask=None):
            """
            visual_embeds (`torch.Tensor` of shape `(batch_size, visual_seq_length, visual_dim)`): What it sees.
            visual_attention_mask (`torch.Tensor` of shape `(batch_size, visual_seq_length)`): What it heeds.
            """

    config = transformers.PretrainedConfig(vocab_size=30, max_position_embeddings=16, visual_dim=6)
    assert hf_inputs(Sees(), config, 2, None).keys() == {"input_ids"}
    made = hf_inputs(Sees(), config, 2, None, ["visual_attention_mask"])
    assert made["visual_embeds"].shape == (2, 16, 6) and made["visual_attention_mask"].shape == (2, 16)
    assert "visual_embeds" not in hf_inputs(Sees(), config, 2, None, ["attention_mask"])


def test_tokens_of_codebooks_have_the_documented_shape_that_runs():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.documented_inputs import documented_shapes
    from simdev.graphs.capture.transformers_inputs import hf_inputs, hf_labels

    class Books(torch.nn.Module):
        main_input_name = "input_ids"

        def forward(self, input_ids, decoder_input_ids=None, labels=None):
            """
            decoder_input_ids (`torch.LongTensor` of shape `(batch_size * books, target_sequence_length)
            or (batch_size, target_sequence_length, books)`, *optional*):
                Tokens of a sound.
            """
            rows, tokens, books = decoder_input_ids.shape

    config = transformers.PretrainedConfig(vocab_size=30, books=5, is_encoder_decoder=True, max_position_embeddings=16)
    sizes = {"batch_size": 2, "target_sequence_length": 7, "books": 5}
    assert documented_shapes(Books(), "decoder_input_ids", sizes) == [(10, 7), (2, 7, 5)]
    assert documented_shapes(Books(), "decoder_input_ids", {"books": 5}) == []
    made = hf_inputs(Books(), config, 2, None)
    assert made["decoder_input_ids"].shape == (2, 16, 5)
    kept = dict(made)
    labels = hf_labels(Books(), config, kept, ["decoder_input_ids"])["labels"]
    assert labels.numel() == 2 * 16 * 5 and "decoder_input_ids" in kept
    hf_labels(Books(), config, made)
    assert "decoder_input_ids" not in made, "most decoders make them of their labels"


def test_an_image_has_whole_windows_of_patches():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import _image_shape

    backbone = transformers.PretrainedConfig(image_size=518, patch_size=14, num_windows=4)
    assert _image_shape(Takes(), backbone) == (3, 504, 504)
    outer = transformers.PretrainedConfig(max_img_size=448)
    assert _image_shape(Takes(), outer) == (3, 448, 448)
    scaled = transformers.PretrainedConfig(scaled_images_ratios=[0.25, 1], patch_size=12, image_size=3)
    assert _image_shape(Takes(), scaled) == (3, 48, 48), "its smallest copy is a patch"


def test_patches_and_features_are_as_wide_as_what_reads_them():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Patches(torch.nn.Module):
        main_input_name = "hidden_states"

        def __init__(self):
            super().__init__()
            self.first, self.config = torch.nn.Linear(24, 4), transformers.PretrainedConfig(hidden_size=10)

        def forward(self, hidden_states, grid_thw):
            return self.first(hidden_states)

    made = hf_inputs(Patches(), transformers.PretrainedConfig(patch_size=2), 2, None)
    assert made["hidden_states"].shape == (2 * 256, 24), "the configuration has another name for frames"

    class Drafts(torch.nn.Module):
        main_input_name = "noise_embeds"

        def __init__(self):
            super().__init__()
            self.first, self.expert = torch.nn.Linear(24, 4), Patches()

        def forward(self, noise_embeds, context, action_embeds, other):
            """
            context (`torch.Tensor` of shape `[batch_size, seq_length, dim * len(config.target_layer_ids)]`): Before.
            other (`torch.Tensor` of shape `[batch_size, config.block_size]`): Beside it.
            """
            return self.first(context), self.expert(action_embeds)

    config = transformers.PretrainedConfig(hidden_size=6, block_size=5, target_layer_ids=[1, 2])
    made = {name: tuple(value.shape) for name, value in hf_inputs(Drafts(), config, 2, None).items()}
    assert made["noise_embeds"] == (2, 77, 6), "as wide as the model"
    assert made["action_embeds"] == (2, 77, 24) and made["context"] == (2, 77, 24), "as wide as their readers"
    assert made["other"] == (2, 5)

    class Expert(Patches):
        def forward(self, inputs_embeds):
            return inputs_embeds

    model = Drafts()
    model.expert = Expert()
    assert hf_inputs(model, config, 2, None)["action_embeds"].shape == (2, 77, 10), "as wide as that part's model"


def test_a_text_with_tokens_gets_no_embedded_ones_beside_them():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Words(torch.nn.Module):
        main_input_name = "input_ids"

        def forward(self, input_ids, inputs_embeds=None, place_mask=None, image_embeds_position_mask=None):
            """
            inputs_embeds (`torch.Tensor` of shape `(batch_size, seq_len, hidden_size)`): Embedded.
            place_mask (`torch.Tensor` of shape `(batch_size, seq_len)`): Of the tokens.
            image_embeds_position_mask (`torch.Tensor` of shape `(batch_size, seq_len)`): Of the images.
            """

    masks = ["place_mask", "image_embeds_position_mask"]
    config = transformers.GPT2Config(vocab_size=20, latent_query_num=3)
    made = hf_inputs(Words(), config, 2, 8, ["inputs_embeds", *masks])
    assert set(made) == {"input_ids", *masks} and made["place_mask"].shape == (2, 8)
    assert made["image_embeds_position_mask"].sum(1).tolist() == [3, 3], "as many as stand for an image"


def test_a_cache_without_attention_is_left_out():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import _has_small_cache

    def has(**fields):
        return _has_small_cache(Takes(), transformers.PretrainedConfig(**fields))

    assert has(layer_types=["linear_attention", "linear_attention"])
    assert not has(layer_types=["linear_attention", "full_attention"]) and not has(layer_types=["sliding_attention"])
    assert not has(num_hidden_layers={"text": 1, "image": 2}, decoder_layers=2), "layers of several parts"


def test_a_video_has_a_mark_among_the_tokens():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import _configured

    config = _configured(transformers.InstructBlipVideoConfig, {}, "transformers:Model", lambda field: False)
    assert config.video_token_id == config.text_config.vocab_size - 1


def test_more_tokens_than_positions_ask_for_another_length():
    from simdev.errors import InvalidInput
    from simdev.graphs.capture.packages import _call

    class Model(torch.nn.Module):
        def forward(self, input_ids):
            raise IndexError("index out of range in self")

    with pytest.raises(InvalidInput, match="another --length, such as 4,"):
        _call(Model(), {"input_ids": torch.zeros(2, 8)})


def test_rotary_parameters_follow_from_the_kinds_of_layers_and_the_sections():
    pytest.importorskip("transformers")
    from simdev.graphs.capture.remedies import rotation_that_follows

    sums = RuntimeError("split_with_sizes expects split_sizes to sum exactly to 64 (...), got split_sizes=[8, 12, 12]")
    plain = '"rope_theta":10000.0,"rope_type":"default"'
    found = rotation_that_follows("transformers:LlamaModel", sums)
    assert found == [("rope_parameters", f'{{{plain},"partial_rotary_factor":0.5}}')]
    assert rotation_that_follows(f"transformers:LlamaModel[rope_parameters={found[0][1]}]", sums) == []
    wide = RuntimeError("split_with_sizes expects split_sizes to sum exactly to 16 (...), got split_sizes=[8, 12, 12]")
    assert rotation_that_follows("transformers:LlamaModel", wide) == [], "a head is too narrow"
    wide = RuntimeError("split_with_sizes expects split_sizes to sum exactly to 11 (...), got split_sizes=[8, 12, 12]")
    assert rotation_that_follows("transformers:Glm4vMoeTextModel", wide) == [("head_dim", "128")], "half of it turns"
    kinds = 'transformers:LlamaModel[layer_types=["full_attention","sliding_attention"]]'
    (name, value), *others = rotation_that_follows(kinds, KeyError("full_attention"))
    assert name == "rope_parameters" and value.count(plain) == 2 and not others
    assert rotation_that_follows(kinds, KeyError("other")) == []


def test_the_channels_beside_a_sample_follow_from_what_is_missing(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    from simdev.graphs.capture import capture_package

    class Timed(torch.nn.Module):
        def __init__(self, in_channels=2, extra_in_channels=0):
            super().__init__()
            self.config = {"in_channels": 2}
            self.first = torch.nn.Conv2d(in_channels + extra_in_channels, 4, 1)

        def forward(self, sample):
            return self.first(sample.repeat(1, 3, 1, 1))

    monkeypatch.setattr(diffusers, "TimedModel", Timed, raising=False)
    assert capture_package("diffusers:TimedModel").meta["source"] == "diffusers:TimedModel[extra_in_channels=4]"


def test_open_fields_of_transformers_get_an_example_that_runs(monkeypatch):
    pytest.importorskip("transformers")
    from simdev.graphs.capture import remedies

    small = "n_layer=1,n_embd=8,n_head=2,vocab_size=20,n_positions=16"
    found = remedies.values_that_run(f"transformers:GPT2Model[{small}]", ["n_inner"])
    assert found == f"transformers:GPT2Model[{small},n_inner=1]"
    assert remedies.values_that_run("transformers:GPT2Model", []) is None
    tried = []
    monkeypatch.setattr(remedies, "_fault", lambda target, fields: tried.append(fields) or ValueError("no"))
    assert remedies.values_that_run("transformers:GPT2Model", ["layer_types", "head_dim", "dropout_rate"]) is None
    few = [("num_hidden_layers", "2"), ("layer_types", '["full_attention","full_attention"]')]
    assert tried == [[*few, ("head_dim", size), ("dropout_rate", "0.0")] for size in ("64", "1")]


def test_labels_are_as_many_as_the_predictions(monkeypatch):
    """A model of images and texts may predict more than it reads; PyTorch's loss says how much."""
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.packages import NeedsArguments, _call

    class Longer(transformers.GPT2LMHeadModel):
        def forward(self, input_ids, labels=None):
            logits = super().forward(input_ids).logits.repeat(1, 3, 1).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
            return transformers.modeling_outputs.CausalLMOutput(loss=loss)

    small = "n_layer=1,n_embd=8,n_head=2,vocab_size=20,n_positions=16"
    monkeypatch.setattr(sys.modules["transformers"], "LongerLMHeadModel", Longer, raising=False)
    graph = capture_package(f"transformers:LongerLMHeadModel[{small}]", batch=2)
    assert graph.meta["optional_inputs"] == ["labels[96]"]
    assert "input()->i64[2,48]" in graph.signatures

    class Counts(torch.nn.Module):
        def forward(self, labels):
            raise ValueError("The labels have another length. Found labels with length 4, expected 6.")

    with pytest.raises(NeedsArguments) as needs:
        _call(Counts(), {"labels": torch.zeros(2, 4)})
    assert needs.value.names == ("labels[12]",)

    class Decodes(torch.nn.Module):
        def forward(self, labels, decoder_input_ids=None):
            raise ValueError("Expected input batch_size (3) to match target batch_size (8).")

    with pytest.raises(NeedsArguments) as needs:
        _call(Decodes(), {"labels": torch.zeros(2, 4)})
    assert needs.value.names == ("decoder_input_ids",), "it does not make them of its labels"

    class Fewer(torch.nn.Module):
        def forward(self, labels):
            raise ValueError("Expected input batch_size (2) to match target batch_size (8).")

    with pytest.raises(NeedsArguments, match="--length"):
        _call(Fewer(), {"labels": torch.zeros(2, 4)})
    with pytest.raises(Exception, match="--length") as refused:
        _call(Fewer(), {"labels": torch.zeros(4, 2)})
    assert not isinstance(refused.value, NeedsArguments), "there is no whole number of predictions for each sample"


def test_labels_of_a_decoder_that_reads_the_text_of_its_encoder():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_labels

    inputs = {"input_ids": torch.zeros(2, 6), "decoder_input_ids": torch.zeros(2, 4)}
    labels = hf_labels(Takes(), transformers.BartConfig(), inputs, ["labels[12]"])["labels"]
    assert labels.shape == (2, 6) and set(inputs) == {"input_ids"}, "it makes its tokens of one or the other"


def test_a_loss_that_does_not_fit_a_model_is_left_out_by_inference():
    from simdev.errors import InvalidInput
    from simdev.graphs.capture.packages import _call

    class Model(torch.nn.Module):
        def forward(self, labels):
            raise TypeError("ForCausalLMLoss() missing 1 required positional argument: 'vocab_size'")

    with pytest.raises(InvalidInput, match="capture it with --mode inference"):
        _call(Model(), {"labels": torch.zeros(2)})


def test_an_encoder_alone_is_no_encoder_with_a_decoder():
    pytest.importorskip("transformers")
    from simdev.graphs.capture.packages import package_step

    with torch.device("meta"):
        step = package_step("transformers:T5GemmaEncoderModel")[0]()
    assert set(step.inputs[0]) == {"input_ids"}


# what a failing model asks for ---------------------------------------------------------------------------------


def test_a_model_is_captured_with_the_field_that_its_error_asks_for(monkeypatch):
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.remedies import fields_asked

    class Asks(transformers.GPT2Model):
        def __init__(self, config):
            assert config.scale_attn_by_inverse_layer_idx, "make sure that `scale_attn_by_inverse_layer_idx=True`."
            super().__init__(config)

    monkeypatch.setattr(sys.modules["transformers"], "AsksModel", Asks, raising=False)
    small = "n_layer=1,n_embd=8,n_head=2,vocab_size=20,n_positions=16"
    graph = capture_package(f"transformers:AsksModel[{small}]", length=8)
    assert graph.meta["source"] == f"transformers:AsksModel[{small},scale_attn_by_inverse_layer_idx=true]"
    assert "the model has scale_attn_by_inverse_layer_idx=true, without which" in graph.meta["inputs_from"]

    error = ValueError("give `n_layer=3`, not `use_cache=True` or `nothing=1`")
    assert fields_asked("transformers:GPT2Model", error) == [("n_layer", "3")]
    assert fields_asked("transformers:GPT2Model[n_layer=5]", error) == [], "a user's field is kept"
    assert fields_asked("timm:resnet18", error) == []


def test_open_values_that_follow_follow_from_others():
    pytest.importorskip("transformers")
    from simdev.graphs.capture.remedies import values_that_follow

    assert values_that_follow("transformers:LlamaModel", ["head_dim"]) == [("head_dim", "128")]
    assert values_that_follow("transformers:LlamaModel", ["head_dim", "other"]) == []
    assert values_that_follow("transformers:LlamaModel", []) == []
    both = values_that_follow("transformers:LlamaModel[num_attention_heads=16]", ["num_key_value_heads", "head_dim"])
    assert both == [("num_key_value_heads", "16"), ("head_dim", "256")]


def test_a_package_that_is_imported_only_if_it_is_there_is_named(tmp_path):
    from simdev.graphs.capture.remedies import missing_package
    from simdev.user_file import import_file

    path = tmp_path / "lacks.py"
    path.write_text("if False:\n    from absent.parts import transforms\n    import math as sums\n"
                    "def call():\n    return transforms\ndef other():\n    return sums\n")  # fmt: skip

    def found(function):
        with pytest.raises(NameError) as failed:
            function()
        return missing_package(failed.value)

    lacks = import_file(path)
    assert found(lacks.call) == "absent: pip install absent"
    assert found(lacks.other) is None, "math is there"
    sentence = "Lacks requires the seen library but it was not found. See https://github.com/seen/seen/INSTALL.md\n"
    assert missing_package(ImportError(sentence)) == "seen: see https://github.com/seen/seen/INSTALL.md"
    assert missing_package(ImportError(f"{sentence} or `pip install seen`")) == "seen: pip install seen"


def test_an_open_field_is_no_argument_that_is_missing(monkeypatch):
    transformers = pytest.importorskip("transformers")
    from simdev.errors import InvalidInput
    from simdev.graphs.capture import capture_package

    class Opens(transformers.GPT2Config):
        best = None

    class ChoosesModel(transformers.GPT2Model):
        config_class = Opens

        def __init__(self, config):
            super().__init__(config)
            self.top_k = config.best

        def forward(self, input_ids, attention_mask=None):
            return super().forward(input_ids, attention_mask=attention_mask)[0].topk(k=self.top_k)

    monkeypatch.setattr(sys.modules["transformers"], "ChoosesModel", ChoosesModel, raising=False)
    small = "n_layer=1,n_embd=8,n_head=2,vocab_size=20,n_positions=16"
    graph = capture_package(f"transformers:ChoosesModel[{small}]")
    assert "it has best=1, which is made up)" in graph.meta["inputs_from"] and "optional_inputs" not in graph.meta
    monkeypatch.setattr("simdev.graphs.capture.remedies.values_that_run", lambda target, unset: None)
    with pytest.raises(InvalidInput, match=r"topk.* reads .*best|leaves best open") as refused:
        capture_package(f"transformers:ChoosesModel[{small}]")
    assert "attention_mask" not in refused.value.message


def test_a_model_without_an_output_to_train_is_captured_without_training(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    from simdev.errors import InvalidInput
    from simdev.graphs.capture import capture_package

    class Codes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.first = {"in_channels": 4}, torch.nn.Conv2d(4, 8, 3)

        def forward(self, sample):
            return self.first(sample).argmax(1).float()

    monkeypatch.setattr(diffusers, "CodesModel", Codes, raising=False)
    with pytest.raises(InvalidInput, match="capture it with --mode inference"):
        capture_package("diffusers:CodesModel")
    assert capture_package("diffusers:CodesModel", mode="inference").meta["flops"] > 0


def test_fields_without_a_default_get_small_values_with_which_the_step_runs(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    from simdev.errors import InvalidInput
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.remedies import fields_that_run

    class Open(torch.nn.Module):
        def __init__(self, in_channels=None, patch_size=None, other=None):
            super().__init__()
            self.config = {"in_channels": in_channels}
            self.first = torch.nn.Conv2d(in_channels, 32 // patch_size, 1)

        def forward(self, sample):
            return self.first(sample)

    class Needs(Open):
        def __init__(self, in_channels, patch_size):
            super().__init__(in_channels, patch_size)

    for model in (Open, Needs):
        monkeypatch.setattr(diffusers, "OpenModel", model, raising=False)
        assert fields_that_run("diffusers:OpenModel") == "diffusers:OpenModel[in_channels=32,patch_size=2]"
        assert (
            fields_that_run("diffusers:OpenModel[in_channels=6]") == "diffusers:OpenModel[in_channels=6,patch_size=2]"
        )
        graph = capture_package("diffusers:OpenModel")
        assert graph.meta["source"] == "diffusers:OpenModel[in_channels=32,patch_size=2]"
        assert graph.meta["parameters"] == 33 * 16
        assert graph.meta["inputs_from"].endswith("it has in_channels=32,patch_size=2, which is made up)")
    assert capture_package(fields_that_run("diffusers:OpenModel")).meta["parameters"] == 33 * 16

    class Never(Open):
        def forward(self, sample):
            raise ValueError

    monkeypatch.setattr(diffusers, "OpenModel", Never, raising=False)
    assert fields_that_run("diffusers:OpenModel") is None
    with pytest.raises(InvalidInput, match="its defaults make no model"):
        capture_package("diffusers:OpenModel")


def test_a_model_has_the_fewest_parts_with_which_its_step_runs(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    from simdev.graphs.capture import capture_package

    class Parts(torch.nn.Module):
        def __init__(self, has_other: bool = False, has_image: bool = False):
            super().__init__()
            self.config = {"in_channels": 4, "has_other": has_other, "has_image": has_image}
            self.first = torch.nn.Conv2d(4, 8, 1)
            self.image = torch.nn.Conv2d(8, 8, 1) if has_image else None

        def forward(self, sample):
            return self.image(self.first(sample))

    monkeypatch.setattr(diffusers, "PartsModel", Parts, raising=False)
    graph = capture_package("diffusers:PartsModel")
    assert graph.meta["source"] == "diffusers:PartsModel[has_image=true]"
    assert "(the model has has_image=true, without which" in graph.meta["inputs_from"]


def test_an_image_may_have_the_size_that_the_image_processor_makes():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Line(torch.nn.Module):
        main_input_name = "pixel_values"
        most = 48

        def forward(self, pixel_values):
            if pixel_values.shape[2] > self.most:
                raise ValueError("more than a line")

    def shape(config):
        return tuple(hf_inputs(Line(), config, 2, None)["pixel_values"].shape)

    config = transformers.PPOCRV5ServerRecConfig()
    assert shape(config) == (2, 3, 48, 320)
    Line.most = 224
    assert shape(config) == (2, 3, 224, 224), "as it runs"
    Line.most = 48
    config.image_size = 60
    assert shape(config) == (2, 3, 60, 60), "the configuration says so"
    assert shape(transformers.DetrConfig()) == (2, 3, 224, 224), "its processor knows no height"


def test_patches_with_axes_of_their_own_go_with_the_grid_that_a_tower_needs():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Tower(torch.nn.Module):
        main_input_name = "pixel_values"

        def forward(self, pixel_values, image_grid_thw):
            """
            pixel_values (`torch.Tensor` of shape `(num_image_tokens, patch_size * merge, num_channels)`): Patches.
            image_grid_thw (`torch.Tensor` of shape `(num_images, 3)`): Grids.
            """

    config = transformers.PretrainedConfig(patch_size=4, merge=2, num_channels=3)
    made = hf_inputs(Tower(), config, 2, None)
    assert made["pixel_values"].shape == (512, 8, 3) and made["image_grid_thw"].tolist() == [[1, 16, 16]] * 2
    assert made["image_grid_thw"].dtype is torch.int64

    class Whole(Tower):
        def forward(self, pixel_values, image_grid_thw=None):
            pass

    assert hf_inputs(Whole(), config, 2, None)["pixel_values"].shape == (2, 3, 224, 224), "it may do without a grid"


def test_a_tower_that_pools_patches_gets_the_place_of_each():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_inputs

    class Tower(torch.nn.Module):
        main_input_name = "pixel_values"

        def forward(self, pixel_values, patch_position_ids):
            """
            patch_position_ids (`torch.LongTensor` of shape `(batch_size, max_patches, 2)`): Of (x, y).
            """

    made = hf_inputs(Tower(), transformers.PretrainedConfig(patch_size=4, pooling_kernel_size=3), 2, None)
    assert {name: tuple(value.shape) for name, value in made.items()} == {
        "pixel_values": (2, 225, 48), "patch_position_ids": (2, 225, 2)
    }, "sixteen patches in a row are five windows and one more"  # fmt: skip
    assert made["patch_position_ids"][1, :17].tolist() == [*([column, 0] for column in range(15)), [0, 1], [1, 1]]


def test_a_loss_of_parts_has_the_labels_of_each():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import made_up_inputs

    class Pretrains(torch.nn.Module):
        main_input_name = "input_ids"
        config = transformers.ViTConfig(image_size=8, patch_size=4, vocab_size=20, max_position_embeddings=6)

        def forward(  # noqa: PLR0913
            self, input_ids, pixel_values, bool_masked_pos=None, text_labels=None, image_labels=None, pair_labels=None,
            point_labels=None, input_labels=None, return_loss=None,
        ):  # fmt: skip
            """
            input_ids (`torch.LongTensor` of shape `(batch_size, text_length)`): Words.
            bool_masked_pos (`torch.BoolTensor` of shape `(batch_size, image_num_patches)`): Masked.
            text_labels (`torch.LongTensor` of shape `(batch_size, text_length)`): Words.
            image_labels (`torch.LongTensor` of shape `(batch_size, image_num_patches)`): Of patches.
            pair_labels (`torch.LongTensor` of shape `(batch_size, 1)`): Whether they match.
            point_labels (`torch.LongTensor` of shape `(batch_size, num_points)`): Nobody knows how many.
            input_labels (`torch.LongTensor` of shape `(batch_size, 1)`): No labels.
            """
            assert pair_labels.dim() == 1

    made = made_up_inputs(Pretrains(), 2, None)
    assert {name: tuple(value.shape) for name, value in made.items() if name != "return_loss"} == {
        "pixel_values": (2, 3, 8, 8), "input_ids": (2, 6), "bool_masked_pos": (2, 4), "text_labels": (2, 6),
        "image_labels": (2, 4), "pair_labels": (2,),
    }  # fmt: skip
    assert made["bool_masked_pos"].all() and made["return_loss"] is True

    class Refuses(Pretrains):
        def forward(self, input_ids, text_labels=None):
            """
            input_ids (`torch.LongTensor` of shape `(batch_size, text_length)`): Words.
            text_labels (`torch.LongTensor` of shape `(batch_size, text_length)`): Words.
            """
            raise ValueError

    assert set(made_up_inputs(Refuses(), 2, None)) == {"input_ids"}, "labels with which it does not run"


def test_words_are_those_of_a_configuration_inside():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import _words

    outer = transformers.PretrainedConfig()
    outer.model_config, outer.vocoder_config = transformers.BertConfig(vocab_size=6), transformers.BertConfig()
    assert set(_words(outer, 200).tolist()) == {3, 4}
    assert _words(transformers.PretrainedConfig(), 2000).max() > 900, "nothing says how many words there are"


def test_each_token_is_spoken_for_some_frames():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import made_up_inputs

    class Speaks(torch.nn.Module):
        main_input_name = "input_ids"
        config = transformers.BertConfig(num_mel_bins=5, max_position_embeddings=6)

        def forward(self, input_ids, spectrogram_labels=None, duration_labels=None, pitch_labels=None):
            """
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): A text with its end.
            spectrogram_labels (`torch.Tensor` of shape `(batch_size, max_spectrogram_length, num_mel_bins)`): Sounds.
            duration_labels (`torch.LongTensor` of shape `(batch_size, sequence_length + 1)`): Frames of each token.
            pitch_labels (`torch.Tensor` of shape `(batch_size, sequence_length + 1, 1)`): Of each token.
            """
            assert input_ids.shape == duration_labels.shape == pitch_labels.shape[:2]

    made = made_up_inputs(Speaks(), 2, None)
    assert made["spectrogram_labels"].shape == (2, 24, 5) and made["spectrogram_labels"].is_floating_point()
    assert made["duration_labels"].sum(1).tolist() == [24, 24] and made["pitch_labels"].shape == (2, 6, 1)


@pytest.mark.parametrize(
    "model, inputs",
    [
        ("PerceiverModel[d_model=16,d_latents=32,num_latents=8,num_self_attends_per_block=1]", {"inputs": [4, 77, 16]}),
        (
            "VideoLlama3VisionModel[hidden_size=32,intermediate_size=32,num_hidden_layers=1,num_attention_heads=2]",
            {"pixel_values": [2048, 768]},
        ),
    ],
)
def test_encoded_inputs_and_merged_patches_are_made_up(model, inputs):
    pytest.importorskip("transformers")
    import transformers

    from simdev.cli.commands.capture import _inputs
    from simdev.graphs.capture import capture_package

    if not hasattr(transformers, model.partition("[")[0]):
        pytest.skip("this release of transformers does not have the model")
    said = " ".join(_inputs(capture_package(f"transformers:{model}")))
    assert all(f"{name} f32[{','.join(map(str, shape))}]" in said for name, shape in inputs.items())


def test_inputs_follow_from_what_the_code_of_a_model_reads():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import _tokens_of_codebooks, _whole_waves, hf_labels, made_up_inputs

    class Wave(torch.nn.Module):
        config = transformers.PreTrainedConfig(samples_per_token=1920)

        def forward(self, input_values):
            return input_values.shape[1] % self.config.samples_per_token == 0

    assert _whole_waves(Wave(), Wave.config) == [(17_280,)]
    codes = transformers.PreTrainedConfig(num_codebooks=3)
    (beside,) = _tokens_of_codebooks(Wave(), codes, {"input_ids": torch.zeros(2, 5, dtype=torch.int64)})
    assert beside["input_ids"].shape == (2, 5, 4), "a token of the text, and one of each codebook"

    class Speech(transformers.BertModel):
        def forward(self, input_ids, labels=None):
            """
            labels (`torch.Tensor` of shape `(batch_size, sequence_length, config.num_mel_bins)`, *optional*):
                Spectrogram.
            """

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    speech = Speech(transformers.BertConfig(**sizes, num_mel_bins=6))
    assert hf_labels(speech, speech.config, {"input_ids": torch.zeros(2, 5)})["labels"].shape[::2] == (2, 6)

    class Packed(transformers.BertModel):
        main_input_name = "pixel_values"

        def forward(self, pixel_values, target_sizes=None):
            pass

    packed = Packed(transformers.BertConfig(**sizes, patch_size=2))
    inputs = made_up_inputs(packed, 3, None)
    assert inputs["pixel_values"].shape == (1, 3, 2, 2 * inputs["target_sizes"].prod(1).sum())


def test_a_default_configuration_that_fails_gets_what_its_code_asks_for():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.remedies import heads_that_divide, switch_of_part, values_that_follow, values_that_run

    small = "hidden_size=12,num_hidden_layers=1,intermediate_size=8,vocab_size=20,max_position_embeddings=16"
    error = ValueError("hidden_size (12) must be divisible by num_heads (5).")
    assert heads_that_divide(f"transformers:BertModel[{small}]", error) == []  # it is 12, which divides
    target = "transformers:SiglipVisionModel[hidden_size=12,num_hidden_layers=1,intermediate_size=8,image_size=32]"
    error = ValueError("embed_dim must be divisible by num_heads (got `embed_dim`: 12 and `num_heads`: 12).")
    assert heads_that_divide(target, error) == [("num_attention_heads", "6")]
    layer = transformers.models.blip_2.modeling_blip_2.Blip2QFormerLayer
    absent = AttributeError(name="intermediate", obj=object.__new__(layer))
    found = switch_of_part("transformers:Blip2ForImageTextRetrieval", absent)
    assert found == [("qformer_config.use_qformer_text_input", "true")]
    assert switch_of_part("transformers:Blip2Model", AttributeError(name="other", obj=object.__new__(layer))) == []
    found = values_that_follow("transformers:DbrxModel", ["attn_config.rope_theta"])
    assert found == [("attn_config.rope_theta", "10000.0")]
    heads = ["head_config.upsample_out_channels", "head_config.upsample_kernel_sizes", "head_config.use_pixel_shuffle"]
    heads += ["head_config.conv_out_channels", "head_config.conv_kernel_sizes"]
    model = "transformers:Sapiens2ForSemanticSegmentation[num_hidden_layers=1,image_size=64]"
    assert "upsample_out_channels=[64],head_config.upsample_kernel_sizes=[3]" in values_that_run(model, heads)


def test_inputs_of_one_documented_shape_are_alike(monkeypatch):
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.transformers_inputs import made_up_inputs

    class Prompted(transformers.ViTModel):
        main_input_name = "pixel_values"

        def forward(self, pixel_values, prompt_masks, side=None):
            """
            prompt_masks (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`):
                What is seen in the prompt.
            """
            return super().forward(torch.cat((prompt_masks, pixel_values), dim=2))

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    prompted = Prompted(transformers.ViTConfig(**sizes, image_size=[64, 32], patch_size=16))
    inputs = made_up_inputs(prompted, 2, None)
    assert {name: made.shape for name, made in inputs.items()} == dict.fromkeys(inputs, (2, 3, 32, 32))
    assert set(inputs) == {"pixel_values", "prompt_masks"}

    class HearsForCTC(transformers.Wav2Vec2ForCTC):
        main_input_name = "input_values"

        def forward(self, input_values, padding_mask=None, labels=None):
            """
            padding_mask (`torch.Tensor` of shape `(batch_size, 1, sequence_length)`):
                Which of the samples are padding.
            """
            lengths = padding_mask
            return super().forward(input_values).logits.mean() * lengths.sum()

    monkeypatch.setattr(sys.modules["transformers"], "HearsForCTC", HearsForCTC, raising=False)
    small = "num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=8,vocab_size=32"
    graph = capture_package(f"transformers:HearsForCTC[{small}]", batch=2)
    assert graph.meta["optional_inputs"] == ["padding_mask"] and "input()->i64[2,16000]" in graph.signatures


def test_labels_are_a_share_of_each_answer_where_the_documentation_says_so():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import hf_labels

    class Answers(transformers.BertModel):
        def forward(self, input_ids, labels=None):
            """
            labels (`torch.Tensor` of shape `(batch_size, num_labels)`, *optional*):
                The shares of all answers.
            """

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = Answers(transformers.BertConfig(**sizes, num_labels=5))
    labels = hf_labels(model, model.config, {"input_ids": torch.zeros(2, 7)})["labels"]
    assert labels.shape == (2, 5) and labels.is_floating_point()


def test_patches_that_a_convolution_reads_are_small_images():
    transformers = pytest.importorskip("transformers")
    from simdev.graphs.capture.transformers_inputs import made_up_inputs

    class Tower(transformers.BertModel):
        main_input_name = "pixel_values"

        def __init__(self, config):
            super().__init__(config)
            self.embed = torch.nn.Conv2d(3, 8, 4, 4)

        def forward(self, pixel_values, grid_thw):
            return self.embed(pixel_values)

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    inputs = made_up_inputs(Tower(transformers.BertConfig(**sizes, patch_size=4)), 2, None)
    assert inputs["pixel_values"].shape == (2 * 16 * 16, 3, 4, 4)


def test_a_sentence_of_a_model_says_which_argument_or_length_it_needs():
    from simdev.graphs.capture.packages import NeedsArguments, _call

    class Asks(torch.nn.Module):
        def forward(self, labels, question_positions=None):
            raise TypeError("question_positions must be specified in order to calculate the loss")

    with pytest.raises(NeedsArguments) as needs:
        _call(Asks(), {"labels": torch.zeros(2)})
    assert needs.value.names == ("question_positions",)

    class Hears(torch.nn.Module):
        def forward(self, input_features, input_ids):
            raise RuntimeError(
                "Attempting to broadcast a dimension of length 125 at -2! Mismatching argument at index 1 had "
                "torch.Size([4, 125, 8]); but expected shape should be broadcastable to [4, 512, 8]"
            )

    heard = torch.zeros(4, 80, 1000)
    with pytest.raises(NeedsArguments) as needs:
        _call(Hears(), {"input_features": heard, "input_ids": torch.zeros(4, 512)})
    assert needs.value.names == ("length[125]",), "each token is heard"
    with pytest.raises(RuntimeError, match="broadcast"):
        _call(Hears(), {"input_features": heard, "input_ids": torch.zeros(4, 256)})
