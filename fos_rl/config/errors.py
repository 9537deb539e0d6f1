"""What pydantic finds wrong with a config, as `field = value: rule; remedy`."""

import difflib
import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from fos_rl.config.run import section_models, tag_of
from fos_rl.config.stored import RENAMED, device_of

# What to do about it, where pydantic's rule alone does not tell.
_TEMPERATURE = (
    "vLLM samples at 0.01 when asked for less and takes none above 2, while the trainer divides by "
    "what it is given; "
)
_REMEDIES = {
    "rollout.temperature": _TEMPERATURE + "use 0.01 to 2 (1.0 is common)",
    "eval.temperature": _TEMPERATURE + "use 0.01 to 2, or eval.samples = 0 with eval.greedy = true "
    "for greedy responses",
    "rollout.top_p": "top-p changes the generator's log-probs by the log of the kept mass, which "
    "the trainer does not apply; leave it out or set 1.0",
    "rollout.top_k": "top-k changes the generator's log-probs by the log of the kept mass, which "
    "the trainer does not apply; leave it out or set 0",
    "rollout.group_size": "an advantage compares responses to one prompt; use 2 or more (8 is "
    "common)",
}


def explain_error(details: ErrorDetails, tree: dict[str, Any]) -> str:
    """One validation error as `field = value: rule; remedy`."""
    if details["type"] == "value_error":
        return str(details["msg"]).removeprefix("Value error, ")
    # Discriminated unions put the chosen tag into the location; it is not a key of the file, and a
    # default one not even a value.
    parts = [str(part) for part in details["loc"]]
    names, node = [], tree
    for part in parts:
        tags = [tag_of(model) for model in section_models(".".join(names))]
        if isinstance(node, dict) and part not in node and part in tags:
            continue
        # So do plain unions, below the value itself.
        if names and not isinstance(node, dict | list):
            continue
        names.append(part)
        node = node.get(part, {}) if isinstance(node, dict) else {}
    name = ".".join(names)
    if details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = details.get("ctx", {})
        key = context["discriminator"].strip("'")
        known = context.get("expected_tags") or ", ".join(_tags(name, key))
        tag = context.get("tag")
        return f"{name}.{key}: {f'{tag!r} is unknown' if tag else 'required'}; one of {known}"
    if details["type"] == "extra_forbidden" and name in RENAMED:
        key, device = RENAMED[name].split(".")[1], device_of(details["input"])
        return f"{name} = {details['input']!r}: it is {RENAMED[name]} now; write {key} = {device!r}"
    if details["type"] == "extra_forbidden":
        known = _known_fields(names[:-1], parts)
        close = difflib.get_close_matches(names[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return f"{name} = {details['input']!r}: unknown key; {hint}"
    if details["type"] == "missing":
        return f"{name}: required; add it to the file or pass --set {name}=VALUE"
    rule = details["msg"][0].lower() + details["msg"][1:]
    # An entry of an array is not a setting of its own.
    section = [part for part in names if not part.isdecimal()][:-1]
    remedy = _REMEDIES.get(name, f"see fos-rl explain {'.'.join(section)}".rstrip())
    return f"{name} = {_as_written(details['input'])}: {rule}; {remedy}"


def _as_written(value: Any) -> str:
    """A value as TOML has it; JSON's spelling differs for infinities and NaN alone."""
    return repr(value) if isinstance(value, float) else json.dumps(value, default=repr)


def _known_fields(section: Sequence[str], location: Sequence[str]) -> list[str]:
    """Field names of a section; where it has several types, of the one the location names."""
    models = section_models(".".join(section))
    if len(models) > 1:
        models = [model for model in models if tag_of(model) in location] or models
    return sorted({name for model in models for name in model.model_fields})


def _tags(section: str, key: str) -> list[str]:
    return [repr(model.model_fields[key].default) for model in section_models(section)]
