"""The parameters of flows: the config classes with every key optional, so that Prefect's form shows and checks them.

Also on a command line: ``prefect deployment run 'retrain/manual' --param 'overrides={"train": {"epochs": 3}}'``.
"""

from __future__ import annotations

import copy
import difflib
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from tasks.core.config import Params, Section
from tasks.core.errors import BadInput


class Partial(BaseModel):
    """Base of sections in which a key may be left out; a key that no section knows is refused with the nearest name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for key in given:
                if key not in known:
                    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
                    raise ValueError(f"unknown key {key!r}; must be {near[0] if near else 'one of ' + ', '.join(known)}")
        return given


def partial(section: type[Section]) -> type[Partial]:
    """``section`` with every field optional and no default: same types, bounds and descriptions; no checks across fields."""
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        own: Any = field.annotation
        if isinstance(own, type) and issubclass(own, Section):
            fields[name] = (partial(own) | None, Field(None, alias=field.alias, description=(own.__doc__ or "").splitlines()[0]))
        else:
            optional = copy.copy(field)
            optional.default = None
            fields[name] = (own | None, optional)
    return create_model(section.__name__.removesuffix("Config"), __base__=Partial, __doc__=section.__doc__, **fields)


_EVERY_SECTION: Any = partial(Params)


class Overrides(_EVERY_SECTION):
    """Sections and keys of params.yaml to change first; what is left out stays as it is."""

    def changes(self) -> dict[str, Any]:
        """As apply_overrides takes them: {section: {key: value}} of what was given."""
        given: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {section: keys for section, keys in given.items() if keys}

    @classmethod
    def checked(cls, tree: dict[str, Any]) -> Self:
        """``tree`` ({section: {key: value}}) as Overrides; raises BadInput ``params_invalid``."""
        try:
            overrides: Self = cls.model_validate(tree)
            return overrides
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            value = problem["input"] if isinstance(problem["input"], str | int | float | bool | list) else None
            message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            raise BadInput("params_invalid", f"overrides: {where or 'sections'}", value=value, constraint=message, knob=where) from None
