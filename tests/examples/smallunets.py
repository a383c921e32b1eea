"""The U-Nets of examples/unets.py with few channels, for images of 64 px."""

from unets import SD_1_5, SDXL, build

NARROW = {"cross_attention_dim": 64, "layers_per_block": 1}
SMALL_SD = {**SD_1_5, "block_out_channels": (32, 64, 64, 64), **NARROW}


def sd_1_5():
    return build(SMALL_SD, (64, 64))


def sdxl():
    few = {
        "block_out_channels": (32, 64, 64),
        "transformer_layers_per_block": (1, 1, 2),
        "attention_head_dim": (1, 2, 2),
    }
    return build({**SDXL, **few, **NARROW}, (64, 64))


def inpainting():
    return build({**SMALL_SD, "in_channels": 9}, (64, 64))
