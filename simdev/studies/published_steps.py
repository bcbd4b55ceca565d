"""Training steps of published diffusion models, as plain modules of diffusers: Flux.1-dev, SDXL's UNet, DiT-XL/2.

``simdev plan`` takes them as it takes a user's file: ``simdev plan simdev/studies/published_steps.py:flux dgx-h100``.
Sizes are those of the published configurations; inputs are those of the published resolutions.
"""

from __future__ import annotations

from simdev.graphs.workload import TrainingStep


def _step(model, inputs: tuple, predict) -> TrainingStep:
    """Predict ``inputs[-1]`` (noise, or a velocity) from the other inputs."""
    import torch

    def loss(model, *tensors):
        return torch.nn.functional.mse_loss(predict(model, *tensors[:-1]).float(), tensors[-1].float())

    return TrainingStep(model, inputs, loss, torch.optim.AdamW(model.parameters(), lr=1e-4))


def flux() -> TrainingStep:
    """Flux.1-dev: 1,024 x 1,024 pixels (4,096 tokens), 512 tokens of text."""
    import torch
    from diffusers import FluxTransformer2DModel

    def predict(model, latents, text, pooled, time, guidance):
        ids = [torch.zeros(some.shape[1], 3, device=some.device) for some in (latents, text)]
        return model(
            hidden_states=latents,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=time,
            guidance=guidance,
            img_ids=ids[0],
            txt_ids=ids[1],
            return_dict=False,
        )[0]

    latents = torch.zeros(1, 4096, 64)
    conditions = torch.zeros(1, 512, 4096), torch.zeros(1, 768), torch.zeros(1), torch.zeros(1)
    return _step(FluxTransformer2DModel(guidance_embeds=True), (latents, *conditions, latents.clone()), predict)


def sdxl() -> TrainingStep:
    """The UNet of Stable Diffusion XL: 1,024 x 1,024 pixels (latents of 128 x 128)."""
    import torch
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )

    def predict(model, latents, time, text, pooled, sizes):
        more = {"text_embeds": pooled, "time_ids": sizes}
        return model(latents, time, text, added_cond_kwargs=more, return_dict=False)[0]

    latents, time = torch.zeros(1, 4, 128, 128), torch.zeros(1, dtype=torch.int64)
    conditions = time, torch.zeros(1, 77, 2048), torch.zeros(1, 1280), torch.zeros(1, 6)
    return _step(model, (latents, *conditions, latents.clone()), predict)


def dit() -> TrainingStep:
    """DiT-XL/2: 256 x 256 pixels (latents of 32 x 32), 1,000 classes; it predicts noise and variance."""
    import torch
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(in_channels=4, out_channels=8, sample_size=32)

    def predict(model, latents, time, label):
        return model(latents, time, label, return_dict=False)[0]

    label = torch.zeros(1, dtype=torch.int64)
    return _step(model, (torch.zeros(1, 4, 32, 32), label, label.clone(), torch.zeros(1, 8, 32, 32)), predict)
