"""Fields and lengths with which a model of transformers is captured whose default configuration fails."""

import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = "n_layer=1,n_embd=8,n_head=2,vocab_size=20,n_positions=16"


def test_a_text_with_more_tokens_than_positions_is_halved_once(monkeypatch):
    from simdev.errors import InvalidInput
    from simdev.graphs.capture import capture_package

    class FewPlaces(transformers.GPT2Model):
        most = 8

        def forward(self, input_ids):
            if input_ids.shape[1] > self.most:
                raise IndexError("index out of range in self")
            return super().forward(input_ids)

    monkeypatch.setattr(sys.modules["transformers"], "FewPlacesModel", FewPlaces, raising=False)
    graph = capture_package(f"transformers:FewPlacesModel[{SMALL}]")
    assert graph.meta["optional_inputs"] == ["length[8]"] and "input()->i64[4,8]" in graph.signatures
    with pytest.raises(InvalidInput, match="another --length, such as 6,"):
        capture_package(f"transformers:FewPlacesModel[{SMALL}]", length=12)
    monkeypatch.setattr(FewPlaces, "most", 4)
    with pytest.raises(InvalidInput, match="another --length, such as 4,"):
        capture_package(f"transformers:FewPlacesModel[{SMALL}]")


def test_rotary_sections_share_half_a_head():
    from simdev.graphs.capture.remedies import rotation_that_follows

    class Rotates(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.mrope_section = config, None

        def forward(self):
            return len(self.mrope_section)

    def follows(target):
        with pytest.raises(TypeError) as failed:
            Rotates(transformers.LlamaConfig()).forward()
        return rotation_that_follows(target, failed.value)

    (name, value), *others = follows("transformers:LlamaModel")
    assert name == "rope_parameters" and '"mrope_section":[16,16,16,16]' in value and not others
    assert '"mrope_section":[9,8,8]' in follows("transformers:LlamaModel[head_dim=50]")[0][1]
    assert follows(f"transformers:LlamaModel[rope_parameters={value}]") == [], "a user's field is kept"
    assert follows("transformers:GPT2Model") == [], "it has no part of this kind"


def test_a_head_of_an_odd_width_gets_one_of_whole_eights():
    from simdev.graphs.capture.remedies import rotation_that_follows

    error = RuntimeError(
        "Attempting to broadcast a dimension of length 74 at -1! ... broadcastable to [4, 28, 512, 73]"
    )
    odd = "transformers:LlamaModel[hidden_size=2048,num_attention_heads=28,head_dim=73]"
    assert rotation_that_follows(odd, error) == [], "a user's field is kept"
    assert rotation_that_follows("transformers:LlamaModel", error) == [], "its heads are even"
    odd = "transformers:Qwen2Model[hidden_size=2048,num_attention_heads=28]"
    assert rotation_that_follows(odd, error) == [("head_dim", "80")]
    other = RuntimeError("Attempting to broadcast a dimension of length 12 at -1! ... to [4, 28, 512, 13]")
    assert rotation_that_follows(odd, other) == []


def test_an_error_may_give_a_list_as_an_example():
    from simdev.graphs.capture.remedies import fields_asked

    error = ValueError(
        "Beit requires config.out_indices to be a list of 2 integers. One can use [3, 5] in a small one."
    )
    assert fields_asked("transformers:BeitModel", error) == [("out_indices", "[3,5]")]
    assert fields_asked("transformers:BeitModel[out_indices=[1,2]]", error) == [], "a user's field is kept"


def test_a_dictionary_that_is_looked_into_has_no_entries(monkeypatch):
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.remedies import empty_dictionary

    class WithNames(transformers.GPT2Config):
        names: dict | None = None
        others: int | None = None

    class LooksUp(transformers.GPT2Model):
        config_class = WithNames

        def __init__(self, config):
            super().__init__(config)
            self.mark = config.names.get("mark")

    monkeypatch.setattr(sys.modules["transformers"], "LooksUpModel", LooksUp, raising=False)
    target = f"transformers:LooksUpModel[{SMALL}]"
    graph = capture_package(target, length=8)
    assert graph.meta["source"] == f"transformers:LooksUpModel[{SMALL},names={{}}]"
    assert empty_dictionary(target, AttributeError("'NoneType' object has no attribute 'shape'")) == []


def test_an_empty_list_gets_an_element_that_its_documentation_supports(monkeypatch):
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.remedies import elements_of_lists

    class Scales(transformers.GPT2Config):
        """
        Args:
            factors (`list[float]`, *optional*, defaults to `[]`):
                Sizes of the levels. Supported values are 0.5, 1.0, and 2.0.
            other (`list[float]`, *optional*, defaults to `[]`):
                Levels without sizes.
        """

        def __init__(self, factors=(), **kwargs):
            super().__init__(**kwargs)
            self.factors, self.other, self.levels = list(factors), [], len(factors)

    class Joins(transformers.GPT2Model):
        config_class = Scales

        def forward(self, input_ids):
            outcome = super().forward(input_ids)[0]
            return torch.cat([outcome * factor for factor in self.config.factors[: self.config.levels]])

    monkeypatch.setattr(sys.modules["transformers"], "JoinsModel", Joins, raising=False)
    target = f"transformers:JoinsModel[{SMALL}]"
    graph = capture_package(target, length=8)
    assert graph.meta["source"] == f"transformers:JoinsModel[{SMALL},factors=[1.0],levels=1]"
    assert elements_of_lists("transformers:JoinsModel[factors=[2.0]]") == [], "a user's field is kept"


def test_a_package_that_lacks_another_is_not_the_one_to_install(tmp_path, monkeypatch):
    from simdev.graphs.capture.remedies import missing_package

    (tmp_path / "simdev_needs.py").write_text("import simdev_absent.parts\n")
    (tmp_path / "simdev_whole.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def asks(name):
        return missing_package(ImportError(f"Model requires the {name} library, `pip install {name}`"))

    assert asks("simdev_needs") == "simdev_absent: pip install simdev_absent"
    assert asks("simdev_other") == "simdev_other: pip install simdev_other"
    assert asks("simdev_whole") == "simdev_whole: pip install simdev_whole"


def test_open_fields_for_experts_are_followed_to_those_that_are_open_next(monkeypatch):
    from simdev.graphs.capture.packages import unset_fields

    class Experts(transformers.GPT2Config):
        num_local_experts: int | None = None
        best: int | None = None

    class Routes(transformers.GPT2Model):
        config_class = Experts

        def __init__(self, config):
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.empty(config.num_local_experts, 4))
            self.top_k = config.best

        def forward(self, input_ids):
            scores = self.weight.sum(1).topk(2)[0]
            return scores.topk(k=self.top_k)[0]

    monkeypatch.setattr(sys.modules["transformers"], "RoutesModel", Routes, raising=False)
    error = TypeError("empty() takes 1 positional argument but 2 were given: `num_local_experts`")
    assert unset_fields(f"transformers:RoutesModel[{SMALL}]", error) == ["num_local_experts", "best"]


def test_a_field_that_a_part_lacks_has_the_value_of_the_configuration_around():
    from simdev.graphs.capture.remedies import values_that_follow

    rate = "text_config.dropout_rate"
    assert values_that_follow("transformers:T5Gemma2Encoder", [rate]) == [(rate, "0.0")]
    assert values_that_follow("transformers:T5Gemma2Encoder", [rate, "text_config.unknown"]) == []
    assert values_that_follow(f"transformers:T5Gemma2Encoder[{rate}=0.5]", [rate]) == [], "its value did not help"


def test_layers_that_are_picked_out_lie_within_a_smaller_depth(monkeypatch):
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.remedies import layers_in_depth

    class Picks(transformers.GPT2Config):
        def __init__(self, picked_indices=(3, 7, 11), **kwargs):
            super().__init__(**kwargs)
            self.picked_indices = list(picked_indices)

    class PicksLayers(transformers.GPT2Model):
        config_class = Picks

        def forward(self, input_ids):
            states = super().forward(input_ids, output_hidden_states=True).hidden_states
            return torch.stack([states[number + 1] for number in self.config.picked_indices])

    monkeypatch.setattr(sys.modules["transformers"], "PicksLayersModel", PicksLayers, raising=False)
    narrow = "n_embd=8,n_head=2,vocab_size=20,n_positions=16"
    graph = capture_package(f"transformers:PicksLayersModel[{narrow},num_hidden_layers=3]", length=8)
    given = f"{narrow},num_hidden_layers=3,picked_indices=[0,1,2]"
    assert graph.meta["source"] == f"transformers:PicksLayersModel[{given}]"
    assert layers_in_depth(f"transformers:PicksLayersModel[{narrow},num_hidden_layers=3,picked_indices=[9]]") == []
    assert layers_in_depth(f"transformers:PicksLayersModel[{narrow},num_hidden_layers=12]") == []


def test_an_open_switch_is_off_in_an_example_that_runs():
    from simdev.graphs.capture.packages import declared_type, is_switch, unset_fields
    from simdev.graphs.capture.remedies import values_that_run

    class Declares(transformers.GPT2Config):
        on: bool | None = None
        either: bool | int | None = None

    assert is_switch(Declares(), "on") and not is_switch(Declares(), "either") and not is_switch(Declares(), "n_embd")
    assert declared_type(Declares(), "unknown") == ""
    model = "transformers:EsmModel[num_hidden_layers=1]"
    error = TypeError("empty() takes a tuple, not NoneType: `vocab_size`, `emb_layer_norm_before`")
    unset = unset_fields(model, error)
    assert {"vocab_size", "emb_layer_norm_before"} <= set(unset)
    example = values_that_run(model, unset)
    assert example is not None and "vocab_size=64" in example and "emb_layer_norm_before=false" in example


def test_what_a_configuration_derives_fits_the_fields_that_are_given():
    from simdev.graphs.capture.packages import _configured, with_derived

    config = _configured(transformers.LlamaConfig, {"hidden_size": 64, "num_attention_heads": 4}, "here", str)
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    config = _configured(transformers.LlamaConfig, {"hidden_size": 64, "head_dim": 128}, "here", str)
    assert (config.hidden_size, config.head_dim) == (64, 128)

    def refuse(own):
        raise ValueError(own)

    assert with_derived(config, {"hidden_size": 3}, refuse) is config
    assert with_derived(config, {"text_config.hidden_size": 3}, refuse) is config


def test_an_open_field_is_named_that_reaches_the_code_as_an_argument():
    from simdev.graphs.capture.packages import package_step, unset_fields

    model = "transformers:PPOCRV6MediumDetModel"
    if not hasattr(transformers, model.partition(":")[2]):
        pytest.skip("this release of transformers does not have the model")
    with pytest.raises(TypeError, match="NoneType") as failed:
        package_step(model)[0]()
    assert unset_fields(model, failed.value) == ["intraclass_block_config"]


def test_a_field_that_is_not_set_has_the_value_of_the_documented_example(monkeypatch):
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.remedies import field_of_example

    class Named(transformers.GPT2Config):
        """
        >>> configuration = Named("short")
        """

        word: str | None = None

    class Needs(transformers.GPT2Model):
        config_class = Named

        def __init__(self, config):
            if config.word is None:
                raise ValueError("word is not set in the config. Please set it.")
            super().__init__(config)

    monkeypatch.setattr(sys.modules["transformers"], "NeedsModel", Needs, raising=False)
    graph = capture_package(f"transformers:NeedsModel[{SMALL}]", length=8)
    assert graph.meta["source"] == f'transformers:NeedsModel[{SMALL},word="short"]'
    assert field_of_example("transformers:NeedsModel", ValueError("n_layer is not set in the config")) == []


def test_the_widths_of_a_backbone_are_those_that_it_has(monkeypatch):
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.remedies import widths_that_fit

    class Reads(transformers.ResNetConfig):
        backbone_config: dict | None = None
        backbone_channel_list: list[int] | None = None

        def __post_init__(self, **kwargs):
            super().__post_init__(**kwargs)
            self.backbone_channel_list = self.backbone_channel_list or [7, 9]

    class Neck(transformers.ResNetModel):
        config_class = Reads

        def __init__(self, config):
            super().__init__(config)
            self.layers = torch.nn.ModuleList(torch.nn.Conv2d(size, 4, 1) for size in config.backbone_channel_list)

        def forward(self, pixel_values):
            found = super().forward(pixel_values)[0]
            return [layer(found) for layer in self.layers]

    monkeypatch.setattr(sys.modules["transformers"], "NeckModel", Neck, raising=False)
    target = 'transformers:NeckModel[embedding_size=8,hidden_sizes=[16],depths=[1],layer_type="basic"]'
    graph = capture_package(target, batch=2)
    assert graph.meta["source"].endswith(",backbone_channel_list=[16,16]]")
    error = RuntimeError("expected input[8, 5, 1, 1] to have 3 channels, but got 5 channels instead")
    assert widths_that_fit(target, error) == [], "it has no such number"


def test_a_convolution_that_reads_all_stages_of_a_backbone_gets_all(monkeypatch):
    from simdev.graphs.capture.remedies import widths_that_fit

    class Joins(transformers.ResNetConfig):
        backbone_config: dict | None = None

        def __post_init__(self, **kwargs):
            super().__post_init__(**kwargs)
            self.backbone_config = transformers.ResNetConfig(
                embedding_size=8, hidden_sizes=[6, 6], depths=[1, 1], layer_type="basic"
            )

    class Bridge(transformers.ResNetPreTrainedModel):
        config_class = Joins

        def __init__(self, config):
            super().__init__(config)
            self.backbone = transformers.ResNetBackbone(config.backbone_config)
            self.joint = torch.nn.Conv2d(12, 4, 1)

        def forward(self, pixel_values):
            maps = self.backbone(pixel_values).feature_maps
            return self.joint(torch.cat([one.mean((2, 3), keepdim=True) for one in maps], dim=1))

    monkeypatch.setattr(sys.modules["transformers"], "BridgeModel", Bridge, raising=False)
    error = RuntimeError("expected input[8, 6, 1, 1] to have 12 channels, but got 6 channels instead")
    assert widths_that_fit("transformers:BridgeModel", error) == [("backbone_config.out_indices", "[1,2]")]


def test_a_backbone_of_another_kind_than_is_declared_makes_way_for_it(monkeypatch):
    from simdev.graphs.capture.packages import package_step
    from simdev.graphs.capture.remedies import widths_that_fit

    spec = type(transformers.LlavaConfig.sub_configs_defaults["vision_config"])
    resnet = {"embedding_size": 8, "hidden_sizes": [5], "depths": [1], "layer_type": "basic"}

    class Declares(transformers.PreTrainedConfig):
        model_type = "declares"
        sub_configs_defaults = {  # noqa: RUF012
            "backbone_config": spec(config_class=transformers.AutoConfig, model_type="resnet", init_kwargs=resnet)
        }
        backbone_config: dict | None = None
        neck_channels: int = 5

        def __post_init__(self, **kwargs):
            given = dict(self.backbone_config or {"model_type": "convnext"})
            self.backbone_config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
            super().__post_init__(**kwargs)

    class Declared(transformers.PreTrainedModel):
        config_class, main_input_name = Declares, "pixel_values"

        def __init__(self, config):
            super().__init__(config)
            self.backbone = transformers.AutoModel.from_config(config.backbone_config)
            self.neck = torch.nn.Conv2d(5, 4, 1)

        def forward(self, pixel_values):
            return self.neck(self.backbone(pixel_values).last_hidden_state)

    monkeypatch.setattr(sys.modules["transformers"], "DeclaredModel", Declared, raising=False)
    error = RuntimeError("expected input[8, 768, 1, 1] to have 5 channels, but got 768 channels instead")
    found = widths_that_fit("transformers:DeclaredModel", error)
    assert [name for name, _ in found] == ["backbone_config"] and '"model_type":"resnet"' in found[0][1]
    made = package_step(f"transformers:DeclaredModel[backbone_config={found[0][1]}]", batch=1)[0]().model.config
    assert made.backbone_config.hidden_sizes == [5], "the class makes a configuration of the dictionary"


def test_a_width_follows_what_a_product_reads_of_several_neighbours(monkeypatch):
    from simdev.graphs.capture.remedies import width_of_product

    class Neighbours(transformers.PreTrainedConfig):
        model_type = "neighbours"
        hidden_size: int = 16
        other_size: int = 7
        joined_size: int = 72  # of four neighbours, in a model that is wider

    class Joined(transformers.PreTrainedModel):
        config_class, main_input_name = Neighbours, "pixel_values"

        def __init__(self, config):
            super().__init__(config)
            self.patches = torch.nn.Conv2d(3, config.hidden_size, 16, 16)
            self.join = torch.nn.Linear(config.joined_size, 5)

        def forward(self, pixel_values):
            return self.join(self.patches(pixel_values).flatten(2).transpose(1, 2).reshape(len(pixel_values), -1, 64))

    class Wide(Joined):
        def forward(self, pixel_values):
            made = self.patches(pixel_values).flatten(2).transpose(1, 2)
            return self.join(made.reshape(len(pixel_values), -1, 4 * self.config.hidden_size))

    error = RuntimeError("a and b must have same reduction dim, but got [196, 64] X [72, 5].")

    def found(cls, fields=""):
        monkeypatch.setattr(sys.modules["transformers"], "NearModel", cls, raising=False)  # a try takes it away again
        return width_of_product(f"transformers:NearModel{fields}", error)

    assert found(Wide) == [("hidden_size", "18")]
    assert found(Wide, "[hidden_size=16]") == [], "it was given"
    assert found(Joined) == [], "it does not run so"


def test_a_declared_field_with_a_misspelt_name_is_set_by_its_right_one(monkeypatch):
    from simdev.graphs.capture.remedies import misspelt_fields

    spec = type(transformers.LlavaConfig.sub_configs_defaults["vision_config"])

    class Outer(transformers.GPT2Config):
        sub_configs_defaults = {  # noqa: RUF012
            "text_config": spec(config_class=transformers.AutoConfig, model_type="gpt2", init_kwargs={"n_layr": 1})
        }

        def __post_init__(self, **kwargs):
            self.text_config = transformers.GPT2Config(n_embd=8, n_head=2, vocab_size=20, n_positions=16)
            super().__post_init__(**kwargs)

        def get_text_config(self, *args, **kwargs):
            return self.text_config

    class Layers(transformers.GPT2Model):
        config_class = Outer

        def __init__(self, config):
            super().__init__(config.text_config)
            assert config.text_config.n_layer == 1

    monkeypatch.setattr(sys.modules["transformers"], "LayersModel", Layers, raising=False)
    assert misspelt_fields("transformers:LayersModel") == [("text_config.n_layer", "1")]
    assert misspelt_fields("transformers:LayersModel[text_config.n_layer=2]") == [], "a user's field is kept"


def test_an_open_field_has_its_documented_value_or_entries_of_the_kind_that_the_code_reads(monkeypatch):
    from simdev.graphs.capture.remedies import values_that_run

    class Says(transformers.GPT2Config):
        """
        rate (`str`, *optional*):
            A share, e.g. `"1/4"` or `"3/8"`.
        kernels (`list[int]`, *optional*, defaults to `[3, 5]`):
            Sizes of kernels.
        class_weights (`list[float]`, *optional*):
            A weight for each class.
        layer_map (`list`, *optional*):
            Pairs of layers.
        """

        rate: str | None = None
        kernels: list | None = None
        layer_map: list | None = None
        blocks: dict | None = None
        class_weights: list[float] | None = None

    class Asks(transformers.GPT2Model):
        config_class = Says

        def __init__(self, config):
            super().__init__(config)
            blocks = config.blocks
            self.first = torch.nn.Conv2d(2, 2, *blocks["first"])
            assert config.rate.split("/") == ["1", "4"] and config.kernels[1] == 5 and len(config.layer_map) == 0
            assert config.class_weights[1] == 0.0

    monkeypatch.setattr(sys.modules["transformers"], "AsksModel", Asks, raising=False)
    open_ones = ["rate", "kernels", "layer_map", "blocks", "class_weights"]
    found = values_that_run(f"transformers:AsksModel[{SMALL}]", open_ones)
    assert found is not None and 'rate="1/4",kernels=[3,5],layer_map=[],blocks={"first":[1,1,0]}' in found
    assert found.endswith(",class_weights=[0.0,0.0]]"), "one for each class, as floats"


def test_a_width_that_is_read_of_a_model_of_timm_is_that_of_a_vision_transformer(monkeypatch):
    from simdev.graphs.capture.remedies import values_that_run

    class Wraps(transformers.GPT2Config):
        architecture: str = "resnet50"
        model_args: dict | None = None

    class Embeds(transformers.GPT2Model):
        config_class = Wraps

        def __init__(self, config):
            super().__init__(config)
            self.proj = torch.nn.Linear(config.model_args["embed_dim"], 4)
            if config.architecture == "resnet50":
                raise TypeError("ResNet.__init__() got an unexpected keyword argument 'embed_dim'")

    monkeypatch.setattr(sys.modules["transformers"], "EmbedsModel", Embeds, raising=False)
    found = values_that_run(f"transformers:EmbedsModel[{SMALL}]", ["model_args"])
    assert found is not None
    assert found.endswith(',model_args={"embed_dim":192},architecture="vit_tiny_patch16_224"]')


def WrongLoss(logits, labels, vocab_size):
    return logits.mean()


def test_a_loss_that_the_package_calls_in_a_wrong_way_is_left_out(monkeypatch):
    from simdev.graphs.capture import capture_package

    class Wrong(transformers.GPT2LMHeadModel):
        def forward(self, input_ids, labels=None):
            found = super().forward(input_ids)
            return WrongLoss(logits=found.logits, labels=labels) if labels is not None else found

    monkeypatch.setattr(sys.modules["transformers"], "WrongLMHeadModel", Wrong, raising=False)
    graph = capture_package(f"transformers:WrongLMHeadModel[{SMALL}]", length=8)
    assert graph.meta["inputs_from"].endswith(", without labels, which the package's loss does not take")


def test_a_model_that_cannot_train_is_refused_in_one_sentence(monkeypatch):
    from simdev.errors import InvalidInput
    from simdev.graphs.capture import capture_package

    class Infers(transformers.GPT2Model):
        @torch.inference_mode()
        def forward(self, input_ids):
            return super().forward(input_ids)

    class Invalid(transformers.GPT2Config):
        def __post_init__(self, **kwargs):
            raise ValueError("size must be 0")

    class Built(transformers.GPT2Model):
        config_class = Invalid

    class Asks(transformers.GPT2PreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.transformer = transformers.GPT2Model(config)

        def forward(self, input_ids):
            return self.transformer(input_ids).image_outputs

    for name, model, says in (
        ("InfersModel", Infers, "runs in inference mode, without gradients: capture it with --mode inference"),
        ("BuiltModel", Built, r"Invalid\(\) fails with its own defaults \(size must be 0\); write a function"),
        ("AsksModel", Asks, r"fails in its own code \(.*\); install another version, or capture .*: GPT2Model$"),
    ):
        monkeypatch.setattr(sys.modules["transformers"], name, model, raising=False)
        with pytest.raises(InvalidInput, match=says):
            capture_package(f"transformers:{name}" + (f"[{SMALL}]" if model is not Built else ""), length=8)


def test_a_model_with_an_open_field_that_is_too_large_is_refused_for_its_size(monkeypatch):
    from simdev.errors import InvalidInput
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture import run as runs

    class Slides(transformers.GPT2Config):
        sliding_window: int | None = None

    class Depends(transformers.GPT2Model):
        config_class = Slides

        def __init__(self, config):
            super().__init__(config)
            if config.sliding_window != 512:
                raise ValueError("`sliding_window` is not set")

        def forward(self, input_ids):
            found = super().forward(input_ids).last_hidden_state
            return found[found.sum(-1) > 0]

    monkeypatch.setattr(sys.modules["transformers"], "DependsModel", Depends, raising=False)
    monkeypatch.setattr(runs, "MOST_REAL_BYTES", 1000)
    with pytest.raises(InvalidInput, match=r"sliding_window=512\]: .*capture a smaller model"):
        capture_package(f"transformers:DependsModel[{SMALL}]", length=8)


def test_a_cache_that_cannot_be_made_is_turned_off(monkeypatch):
    from simdev.graphs.capture.remedies import no_cache

    class WithoutDepth:
        pass

    with pytest.raises(AttributeError) as failed:
        transformers.DynamicCache(config=WithoutDepth())
    assert no_cache("transformers:GPT2Model", failed.value) == [("use_cache", "false")]
    assert no_cache("transformers:GPT2Model[use_cache=true]", failed.value) == [], "a user's field is kept"
    assert no_cache("transformers:GPT2Model", AttributeError("other")) == []


def test_a_class_in_small_letters_can_be_captured_and_one_without_its_package_cannot(monkeypatch):
    from simdev.errors import InvalidInput, Unsupported
    from simdev.graphs.capture import capture_package
    from simdev.graphs.capture.packages import package_step

    class small(transformers.GPT2Model):
        pass

    class Absent(type):
        def __getattribute__(cls, name):
            raise ImportError("\nStandsIn requires the no_such_sounds library but it was not found.")

    monkeypatch.setattr(sys.modules["transformers"], "smallModel", small, raising=False)
    assert package_step(f"transformers:smallModel[{SMALL}]")[1].startswith("smallModel")
    monkeypatch.setattr(sys.modules["transformers"], "StandsIn", Absent("StandsIn", (), {}), raising=False)
    with pytest.raises(Unsupported, match="StandsIn needs the package no_such_sounds: pip install"):
        capture_package("transformers:StandsIn")
    monkeypatch.setattr(small, "forward", torch.nn.Module.forward)
    with pytest.raises(InvalidInput, match="has no forward pass of its own$"):
        package_step("transformers:smallModel")
