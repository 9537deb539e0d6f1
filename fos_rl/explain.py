"""`fos-rl explain`: every setting with its default, read from the models themselves."""

from types import GenericAlias
from typing import Any, get_args

from fos_rl.config import section_models
from fos_rl.spec import Frozen


def explain(section: str = "") -> str:
    """The fields of a section and of the sections below it.

    Raises:
        ValueError: when there is no such section.
    """
    models = section_models(section)
    if not models:
        raise ValueError(f"no section {section!r}; fos-rl explain lists all")
    return "\n".join(_explain_model(section, model) for model in models)


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
        name = str(annotation)
    else:
        name = " | ".join(_type_name(part, []) for part in parts)
    limits = [
        f"{sign} {getattr(item, key):g}"
        for item in _flat(metadata)
        for key, sign in _LIMITS.items()
        if hasattr(item, key)
    ]
    return ", ".join([name, *limits])


def _flat(metadata: list[Any]) -> list[Any]:
    return [m for item in metadata for m in (getattr(item, "metadata", None) or [item])]
