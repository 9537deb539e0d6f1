"""`fos-rl explain`: every setting with its default, read from the models themselves."""

from types import GenericAlias
from typing import Any, get_args

from fos_rl.config import section_models
from fos_rl.config.metrics import explain_metrics
from fos_rl.spec import MAX_INT, Frozen

# Each is refused before an actor starts; tests/config/test_explain.py makes each of these mistakes.
IMPOSSIBLE = {
    "recipe = 'bf16' with trainer.backward_override": "nothing is quantized, so there is no other "
    "backward; leave it out",
    "row_scaled_activation = true with trainer.backward_override = 'quantized'": "the weight "
    "gradient sums over rows, and a factor of each row cannot leave that sum; use 'high_precision' "
    "or 'dequantized', or row_scaled_activation = false",
    "a layer whose inputs are not a multiple of 16 (mxfp8: 32)": "blocks run along them; exclude "
    "it",
    "weight_block = '16x16' with outputs that are not a multiple of 16": "a block has 16 rows; use "
    "'1x16', or exclude the layer",
    "backward 'quantized' with outputs that are not a multiple of 16 (mxfp8: 32)": "blocks of dY "
    "run along them; use 'high_precision' or 'dequantized', or exclude the layer",
    "a pattern of include or exclude that matches no layer": "a typing mistake would quantize "
    "something else; `*.mlp.experts.*` needs a mixture of experts",
    "include, exclude and the bf16 windows that together leave no layer": "use recipe = 'bf16'",
    "gemm = 'native' without compute capability 10.0 or 10.3": "no FP4 units; use 'emulated'",
    "gemm = 'native' for experts with generator.cuda_graphs = true": "their forward reads on the "
    "host which rows each expert gets, which a graph cannot record; use generator.cuda_graphs = "
    "false, or 'emulated'",
    "err_mode or e4m3_scale_bound with recipe = 'nvfp4'": "one encoding, with bound 448; use "
    "'nvfp4_four_over_six'",
    "row_scaled_activation, weight_block with recipe = 'mxfp8'": "it has one scale for 32 elements "
    "and no amax above it; leave them out",
    "consistency = 'exact' with row_scaled_activation = false": "a token's codes depend on the "
    "others of its batch; use true, or consistency = 'fast'",
    "consistency = 'exact' with gemm = 'native'": "the order of additions depends on the number of "
    "tokens; use 'emulated'",
    "consistency = 'exact' with different num_threads of trainer and generator": "a CPU may split "
    "a product, and its sums, by threads; give both the same",
    "consistency = 'exact' with trainer and generator on different devices": "they add in other "
    "orders; give trainer.device and generator.device the same value",
}


def explain(section: str = "") -> str:
    """The fields of a section and of the sections below it; for "metrics", what is measured.

    Raises:
        ValueError: when there is no such section.
    """
    if section == "metrics":
        return explain_metrics()
    models = section_models(section)
    if not models:
        raise ValueError(f"no section {section!r}; fos-rl explain lists all")
    text = "\n".join(_explain_model(section, model) for model in models)
    return f"{text}\n{_explain_impossible()}" if section == "model.precision" else text


def _explain_impossible() -> str:
    lines = ["[model.precision: what cannot work together, and why]"]
    for combination, reason in IMPOSSIBLE.items():
        lines += [f"  {combination}", f"      {reason}"]
    return "\n".join(lines) + "\n"


def _explain_model(section: str, model: type[Frozen]) -> str:
    lines = [f"[{section}]" if section else "[top level]"]
    if doc := (model.__doc__ or "").strip():
        lines.append("  " + " ".join(doc.split()))
    below: list[str] = []
    for name, info in model.model_fields.items():
        dotted = f"{section}.{name}" if section else name
        if section_models(dotted):
            below.append(dotted)
            continue
        default = "required" if info.is_required() else repr(info.get_default())
        lines.append(f"  {name} = {default}  ({_type_name(info.annotation, info.metadata)})")
        if info.description:
            lines.append("      " + " ".join(info.description.split()))
    text = "\n".join(lines) + "\n"
    return "\n".join([text, *(explain(dotted) for dotted in below)]) if below else text


_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _type_name(annotation: Any, metadata: list[Any]) -> str:
    """A type as a user reads it: `float, > 0, < 1`, `'keep' | 'mask'`."""
    parts = get_args(annotation)
    if not parts:
        name = annotation.__name__ if isinstance(annotation, type) else repr(annotation)
    elif annotation.__class__.__name__ == "_AnnotatedAlias":
        return _type_name(parts[0], [*metadata, *parts[1:]])
    elif isinstance(annotation, GenericAlias):
        inner = "; ".join("..." if part is ... else _type_name(part, []) for part in parts)
        name = f"{annotation.__origin__.__name__}[{inner}]"
    else:
        name = " | ".join(_type_name(part, []) for part in parts)
    limits = [
        f"{sign} {getattr(item, key):g}"
        for item in _flat(metadata)
        for key, sign in _LIMITS.items()
        # Every whole number has this limit; it tells a reader nothing.
        if getattr(item, key, MAX_INT) != MAX_INT
    ]
    return ", ".join([name, *limits])


def _flat(metadata: list[Any]) -> list[Any]:
    return [m for item in metadata for m in (getattr(item, "metadata", None) or [item])]
