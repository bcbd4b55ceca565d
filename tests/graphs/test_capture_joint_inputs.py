"""Inputs of models of diffusers that share axes with the sample, by their code and their documentation."""

import pytest

torch = pytest.importorskip("torch")


def made_for(model, optional=()):
    from simdev.graphs.capture.diffusion_inputs import diffusion_inputs

    return diffusion_inputs(model, 1, optional)


def shapes(inputs: dict) -> dict:
    return {name: tuple(item.shape) for name, item in inputs.items() if isinstance(item, torch.Tensor)}


def test_axes_are_read_wherever_the_documentation_gives_them():
    from simdev.graphs.capture.joint_inputs import alias, described_axes

    class Described:
        def forward(self, sample, timestep, text, mask, other):
            """
            Args:
                sample (`torch.Tensor`):
                    A video of shape `(batch_size,
                    frames)`.
                timestep: ``(B, 1, T)`` time steps.
                text (`torch.Tensor` of shape `(batch, config.width)`):
                    Words.
                mask: Alias for ``text``.
                other: as wide as `(batch, 3)`.

            Returns:
                other: ``(B, 5)``
            """

    axes = {name: described_axes(Described(), name) for name in ("sample", "timestep", "text", "mask", "other")}
    found = {"sample": ["batch_size", "frames"], "timestep": ["B", "1", "T"], "text": ["batch", "width"]}
    assert axes == {**found, "mask": [], "other": []}
    assert alias(Described(), "mask") == "text" and alias(Described(), "text") == "text"


def test_names_in_axes_are_solved_for():
    from simdev.graphs.capture.joint_inputs import solved

    assert solved(["B", "2C + 4", "T + 1", "3 * H", "W - 2"], (1, 36, 2, 9, 6)) == {
        "B": 1,
        "C": 16,
        "T": 1,
        "H": 3,
        "W": 8,
    }
    assert solved(["2C + 4"], (35,)) == {} and solved(["T + 1"], (1,)) == {}, "no whole number, and nothing left"
    assert solved(["B"], (1, 2)) == {}, "another number of axes"


def test_an_argument_has_the_frames_that_the_sample_leaves_it():
    class Posed(torch.nn.Module):
        config = {"in_channels": 36}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.embed, self.pose = torch.nn.Conv3d(36, 8, 1), torch.nn.Conv3d(16, 8, 1)
            self.face = Face()

        def forward(self, hidden_states, pose_hidden_states=None, face_pixel_values=None):
            """
            Args:
                hidden_states (`torch.Tensor` of shape `(B, 2C + 4, T + 1, H, W)`):
                    The video.
                pose_hidden_states (`torch.Tensor` of shape `(B, C, T, H, W)`):
                    The pose.
                face_pixel_values (`torch.Tensor` of shape `(B, C', S, H', W')`):
                    The face.
            """
            return self.embed(hidden_states)[:, :, 1:] + self.pose(pose_hidden_states) + self.face(face_pixel_values)

    class Face(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.size, self.read = 24, torch.nn.Conv2d(3, 8, 1)

    found = shapes(made_for(Posed(), ["pose_hidden_states", "face_pixel_values"]))
    sample = {"hidden_states": (1, 36, 2, 32, 32), "pose_hidden_states": (1, 16, 1, 32, 32)}
    assert found == {**sample, "face_pixel_values": (1, 3, 1, 24, 24)}


class Packed(torch.nn.Module):
    config = {"in_channels": 6}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.embed, self.text = torch.nn.Linear(6, 8), torch.nn.Linear(5, 8)


def test_the_parts_of_a_packed_sequence_have_places_in_a_row():
    class Placed(Packed):
        def forward(self, hidden_states, encoder_hidden_states, video_indices, text_indices, kinds, position_ids):
            """
            Args:
                hidden_states (`torch.Tensor` of shape `(batch_size, num_video_tokens, in_channels)`):
                    The video.
                encoder_hidden_states (`torch.Tensor` of shape `(batch_size, num_text_tokens, text_dim)`):
                    The text.
                video_indices (`torch.Tensor` of shape `(num_video_tokens,)`):
                    Places of the video.
                text_indices (`torch.Tensor` of shape `(num_text_tokens,)`):
                    Places of the text.
                kinds (`torch.Tensor` of shape `(seq_len,)`):
                    Kinds.
                position_ids (`torch.Tensor` of shape `(seq_len, 3)`):
                    Positions.
            """
            return self.embed(hidden_states), self.text(encoder_hidden_states)

    found = made_for(Placed())
    texts = {"hidden_states": (1, 1024, 6), "encoder_hidden_states": (1, 77, 5)}
    places = {"video_indices": (1024,), "text_indices": (77,), "kinds": (1101,), "position_ids": (1101, 3)}
    assert shapes(found) == texts | places
    rows = torch.cat([found["video_indices"], found["text_indices"]])
    assert rows.tolist() == list(range(1101)) and found["kinds"].dtype == torch.int64


def test_a_text_and_an_image_of_one_sequence_are_as_long_as_it():
    class Joint(Packed):
        def forward(self, hidden_states, encoder_hidden_states, position_ids, roles):
            """
            Args:
                hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, in_channels)`):
                    The image, with zeros for the text.
                encoder_hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, text_dim)`):
                    The text, with zeros for the image.
                position_ids (`torch.Tensor` of shape `(batch_size, sequence_length, 3)`):
                    Positions.
                roles (`torch.Tensor` of shape `(batch_size, sequence_length)`):
                    Roles.
            """
            return self.embed(hidden_states) + self.text(encoder_hidden_states)

    length = 77 + 32 * 32
    sizes = {"hidden_states": (6,), "encoder_hidden_states": (5,), "position_ids": (3,), "roles": ()}
    assert shapes(made_for(Joint())) == {name: (1, length, *rest) for name, rest in sizes.items()}


def test_tokens_have_time_steps_and_positions_of_their_own():
    class Timed(Packed):
        def grid(self, frame_positions, height, width, device, fps):
            return torch.ones(len(frame_positions) * height * width, 4, device=device)

        def forward(self, hidden_states, timestep, rotary):
            """
            Args:
                hidden_states (`torch.Tensor`):
                    Tokens of shape `(batch_size, num_tokens, in_channels)`.
                timestep (`torch.Tensor`):
                    Time steps of shape `(batch_size, num_tokens)`.
                rotary (`torch.Tensor`):
                    Positions, as returned by
                    [`~Timed.grid`].
            """
            return self.embed(hidden_states)

    wanted = {"hidden_states": (1, 1024, 6), "timestep": (1, 1024), "rotary": (1024, 4)}
    assert shapes(made_for(Timed())) == wanted

    class Twice(Timed):
        def forward(self, hidden_states, timestep, rotary, audio_timestep=None):
            return self.embed(hidden_states)

    Twice.forward.__doc__ = Timed.forward.__doc__
    assert shapes(made_for(Twice()))["timestep"] == (1,), "those of another sample, of other tokens, may be the same"


def test_a_sequence_of_named_parts_has_the_patches_of_each():
    class Named(torch.nn.Module):
        config = {"latent_channel": 4, "latent_patch_size": 2, "vocab_size": 9}  # noqa: RUF012

        def forward(  # noqa: PLR0913
            self, input_ids, text_indexes, position_ids, und_len, sequence_length, vision_tokens, vision_token_shapes,
            vision_sequence_indexes, vision_mse_loss_indexes, vision_timesteps, vision_noisy_frame_indexes,
            sound_tokens=None, sound_token_shapes=None, sound_sequence_indexes=None,
        ): ...  # fmt: skip

    found = made_for(Named())
    assert found["vision_tokens"][0].shape == (1, 4, 2, 32, 32) and found["vision_token_shapes"] == [(2, 16, 16)]
    places = torch.cat([found["text_indexes"], found["vision_sequence_indexes"]])
    assert places.tolist() == list(range(77 + 512)) and found["sequence_length"] == 77 + 512
    assert found["position_ids"].shape == (3, 77 + 512) and found["vision_timesteps"].shape == (512,)
    assert not any(name.startswith("sound") for name in found), "a part that it may do without"


def test_what_a_layer_reads_together_is_shared_among_the_arguments():
    from simdev.graphs.capture.readers import joined_widths

    class Wave1D(torch.nn.Module):
        config = {}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.read, self.write = torch.nn.Conv1d(12, 8, 2), torch.nn.ConvTranspose1d(8, 4, 2)

        def forward(self, hidden_states, context_latents, timestep):
            hidden_states = torch.cat([context_latents, hidden_states], dim=-1)
            length = hidden_states.shape[1]
            hidden_states = self.read(hidden_states.transpose(1, 2))
            return self.write(hidden_states)[:, :length]

    class Rows1D(Wave1D):
        def forward(self, hidden_states, context_latents, timestep):
            hidden_states = torch.cat([context_latents, hidden_states], dim=1)
            return self.read(hidden_states)

    assert joined_widths(Wave1D(), "hidden_states") == {"context_latents": 8, "hidden_states": 4}
    assert joined_widths(Rows1D(), "hidden_states") == {}, "one behind the other"
    wanted = {"hidden_states": (1, 1024, 4), "context_latents": (1, 1024, 8), "timestep": (1,)}
    assert shapes(made_for(Wave1D())) == wanted


def test_a_model_of_tiles_alone_gets_one(monkeypatch):
    pytest.importorskip("diffusers")
    import diffusers

    from simdev.graphs.capture.packages import package_step

    class Tiled(torch.nn.Module):
        config = {"in_channels": 3, "sample_size": 32}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.read, self.kernel, self.tiling = torch.nn.Conv3d(3, 8, 1), (24, 32, 32), False

        def enable_tiling(self):
            self.tiling = True

        def _encode(self, sample):
            if self.tiling:
                return self.read(sample)
            raise NotImplementedError("Encoding without tiling has not been implemented yet.")

        def encode(self, sample):
            return self._encode(sample)

        def forward(self, sample):
            return self.encode(sample)

    monkeypatch.setattr(diffusers, "Tiled", Tiled, raising=False)
    step = package_step("diffusers:Tiled")[0]()
    assert step.inputs[0]["sample"].shape == (1, 3, 24, 32, 32)
    assert step.loss(step.model, *step.inputs).numel() == 1


def test_a_text_for_each_layer_has_the_width_of_its_encoder():
    class Layered(torch.nn.Module):
        config = {"in_channels": 4, "caption_channels": [6, 5], "layers": [0, 2], "text_emb_dim": 7}  # noqa: RUF012

        def forward(
            self, hidden_states, encoder_hidden_states_one=None, encoder_hidden_states_two=None, pooled_embeds=None
        ):
            return [encoder_hidden_states_two[layer] for layer in self.config.layers]

    found = made_for(Layered())
    assert found["encoder_hidden_states_one"].shape == (1, 77, 6) and found["pooled_embeds"].shape == (1, 7)
    assert [tuple(text.shape) for text in found["encoder_hidden_states_two"]] == [(1, 77, 5)] * 3


def test_positions_are_as_many_as_the_error_of_the_code_says(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    from simdev.graphs.capture import capture_package

    class Joint(torch.nn.Module):
        config = {"in_channels": 4, "vocab_size": 9}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.words, self.patches = torch.nn.Embedding(9, 8), torch.nn.Conv2d(4, 8, 2, 2)

        def forward(
            self, hidden_states, input_ids, images: list[torch.Tensor], sizes: dict[int, list[int]], attention_mask,
            position_ids,
        ):  # fmt: skip
            rows = torch.cat([self.words(input_ids), self.patches(hidden_states).flatten(2).transpose(1, 2)], 1)
            rows = rows + position_ids.view(-1, rows.shape[1])[..., None]
            if attention_mask.dim() == 3 and not images and not sizes:
                rows = attention_mask.float() @ rows
            return rows

    monkeypatch.setattr(diffusers, "JointModel", Joint, raising=False)
    graph = capture_package("diffusers:JointModel")
    length = 77 + 16 * 16
    assert graph.meta["optional_inputs"] == [f"position_ids[{length}]"]
    masks = [f"input()->i64[1,{length},{length}]", f"input()->i64[1,{length}]"]
    assert set(masks) <= {str(signature) for signature in graph.signatures}


def test_fields_of_lists_and_factors_get_values_with_which_a_step_runs(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    from simdev.graphs.capture import capture_package, remedies

    class Factors(torch.nn.Module):
        def __init__(self, rope_scaling: dict = None):  # noqa: RUF013
            super().__init__()
            self.config = {"in_channels": 4}
            self.factors = rope_scaling["short_factor"] + rope_scaling["long_factor"]
            self.first = torch.nn.Conv2d(4, 8, 1)

        def forward(self, sample):
            return self.first(sample) * self.factors[0]

    class Lists(Factors):
        def __init__(
            self, caption_channels: list[int] = None, llama_layers: list[int] = None, num_layers: int = 9,  # noqa: RUF013
            num_single_layers: int = 9, num_attention_heads: int = 8, attention_head_dim: int = 16,
            axes_dims_rope: tuple[int, int] = (4, 4),
        ):  # fmt: skip
            super().__init__({"short_factor": [1.0], "long_factor": [1.0]})
            few = num_layers + num_single_layers == len(llama_layers) and num_attention_heads == 4
            if not few or sum(axes_dims_rope) != attention_head_dim or len(caption_channels) != 2:
                raise ValueError

    monkeypatch.setattr(diffusers, "OpenModel", Factors, raising=False)
    found = remedies.fields_that_run("diffusers:OpenModel")
    assert found == 'diffusers:OpenModel[rope_scaling={"short_factor":[1.0],"long_factor":[1.0]}]'
    assert capture_package("diffusers:OpenModel").meta["source"] == found, "factors of 1 change no shape"

    class Sizes(Factors):
        def __init__(self, sizes: dict = None):  # noqa: RUF013
            super().__init__({"short_factor": [sizes["width"][0]], "long_factor": [1.0]})

    monkeypatch.setattr(diffusers, "OpenModel", Sizes, raising=False)
    graph = capture_package("diffusers:OpenModel")
    assert graph.meta["inputs_from"].endswith('its step does not run; it has sizes={"width":[1.0]}, which is made up)')
    monkeypatch.setattr(diffusers, "OpenModel", Lists, raising=False)
    fields = "num_layers=1,num_single_layers=1,num_attention_heads=4,axes_dims_rope=[8,4,4]"
    found = remedies.fields_that_run("diffusers:OpenModel")
    assert found == f"diffusers:OpenModel[caption_channels=[64,64],llama_layers=[0,1],{fields}]"


def test_a_step_that_asks_for_values_runs_only_if_it_is_small(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    import simdev.graphs.capture.run as run
    from simdev.graphs.capture.remedies import fields_that_run

    class Counts(torch.nn.Module):
        def __init__(self, in_channels=None):
            super().__init__()
            self.config = {"in_channels": in_channels}
            self.first = torch.nn.Conv2d(in_channels, 256, 1)  # too many weights for their values to be known

        def forward(self, sample):
            found = self.first(sample)
            return found[found > 0]

    monkeypatch.setattr(diffusers, "OpenModel", Counts, raising=False)
    assert fields_that_run("diffusers:OpenModel") == "diffusers:OpenModel[in_channels=32]"
    monkeypatch.setattr(run, "MOST_REAL_BYTES", 100)
    assert fields_that_run("diffusers:OpenModel") is None


def test_a_condition_is_as_wide_as_the_layer_that_embeds_it():
    class Controlled(torch.nn.Module):
        config = {"in_channels": 6}  # noqa: RUF012

        def __init__(self, embed, embed_condition):
            super().__init__()
            self.embed, self.hint, self.embed_condition = embed, None, embed_condition

        def forward(self, hidden_states, controlnet_cond):
            if self.hint is not None:
                controlnet_cond = self.hint(controlnet_cond)
            return self.embed(hidden_states) + self.embed_condition(controlnet_cond)

    class Placed(Controlled):
        def forward(self, hidden_states, controlnet_cond, img_ids):
            return self.x_embedder(hidden_states) + self.embed_condition(controlnet_cond)

    latents = Controlled(torch.nn.Conv2d(6, 8, 1), torch.nn.Sequential(torch.nn.Conv2d(5, 8, 1)))
    assert shapes(made_for(latents))["controlnet_cond"] == (1, 5, 32, 32)
    image = Controlled(torch.nn.Conv2d(6, 8, 1), torch.nn.Conv2d(3, 8, 8, 8))
    assert shapes(made_for(image))["controlnet_cond"] == (1, 3, 256, 256)
    tokens = Placed(None, torch.nn.Linear(5, 8))
    tokens.x_embedder = torch.nn.Linear(6, 8)
    assert shapes(made_for(tokens)) == {
        "hidden_states": (1, 1024, 6),
        "img_ids": (1024, 3),
        "controlnet_cond": (1, 1024, 5),
    }


def test_features_of_tokens_and_of_waves_are_as_wide_as_their_first_layer():
    class Head(torch.nn.Module):
        config = {}  # noqa: RUF012

        def __init__(self, first):
            super().__init__()
            self.first = first

        def forward(self, hidden_states):
            return self.first(hidden_states)

    class Timed(Head):
        def forward(self, hidden_states, timestep):
            return self.first(hidden_states)

    assert shapes(made_for(Head(torch.nn.Linear(5, 8)))) == {"hidden_states": (1, 77, 5)}
    assert shapes(made_for(Head(torch.nn.Conv1d(5, 8, 1)))) == {"hidden_states": (1, 5, 1024)}
    assert len(shapes(made_for(Timed(torch.nn.Linear(5, 8))))["hidden_states"]) == 4, "a latent is denoised"


def test_the_documentation_gives_shapes_where_no_rule_does():
    class Documented(torch.nn.Module):
        config = {"in_channels": 4, "width": 6, "scales": [3, 4]}  # noqa: RUF012

        def forward(self, sample, seconds, features, unknown, unlike, scale, sizes=None):
            """
            Args:
                sample (`torch.Tensor`):
                    A latent.
                seconds (`torch.Tensor` of shape `(batch,)`):
                    Of each sample.
                features (`torch.Tensor` of shape `(batch_size, steps, width)`):
                    Of each step.
                unknown (`torch.Tensor` of shape `(batch_size, steps, other_width)`):
                    As wide as nobody says.
                unlike (`torch.Tensor` of shape `(batch_size, something, width)`):
                    As many as nobody says.
                scale (`int`):
                    One of `scales`.
                sizes (`torch.Tensor` of shape `(batch,)`):
                    Not needed.
            """

    found = made_for(Documented())
    assert shapes(found) == {"sample": (1, 4, 32, 32), "seconds": (1,), "features": (1, 77, 6)}
    assert found["scale"] == 3

    class Mono(torch.nn.Module):
        config = {"audio_channels": 1}  # noqa: RUF012

        def forward(self, sample):
            """
            Args:
                sample (`torch.Tensor` of shape `(batch_size, num_samples)`):
                    A wave.
            """

    assert shapes(made_for(Mono())) == {"sample": (1, 1 << 15)}


def test_an_encoder_may_say_how_many_channels_a_sound_has():
    class Spectral(torch.nn.Module):
        config = {}  # noqa: RUF012
        encode = None

        def __init__(self, said):
            super().__init__()
            self.encoder = torch.nn.Sequential(torch.nn.Conv1d(66, 8, 1))
            self.encoder.input_channels = said

        def forward(self, sample): ...

    assert shapes(made_for(Spectral(2))) == {"sample": (1, 2, 1 << 15)}
    assert shapes(made_for(Spectral(None))) == {"sample": (1, 66, 1 << 15)}


def test_a_layer_without_a_bias_does_not_hide_an_argument_that_is_missing(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    from simdev.graphs.capture import capture_package

    class Global(torch.nn.Module):
        config = {"in_channels": 4, "global_dim": 5}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.first, self.whole = torch.nn.Conv2d(4, 8, 1), torch.nn.Linear(5, 8, bias=False)

        def forward(self, sample, global_hidden_states=None):
            return self.first(sample).mean((2, 3)) + self.whole(global_hidden_states)

    monkeypatch.setattr(diffusers, "GlobalModel", Global, raising=False)
    assert capture_package("diffusers:GlobalModel").meta["optional_inputs"] == ["global_hidden_states"]
