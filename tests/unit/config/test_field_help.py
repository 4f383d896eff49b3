"""The help of config fields: the strings under them, as pydantic's `use_attribute_docstrings` reads them."""

from __future__ import annotations

from pydantic import create_model

from trivium.config import Plugin, free


class Documented(Plugin):
    """Its fields carry strings."""

    kind: str = "documented"
    plain: int = 1
    """A number,
    over two lines."""
    marked: int = free(2, ge=1)
    """A field with a constraint."""
    silent: int = 3

    class Inner(Plugin):
        kind: str = "inner"
        plain: int = 1
        """Of the inner class."""


class Derived(Documented):
    silent: int = 4
    """No longer silent."""


def test_the_string_under_a_field_is_its_help() -> None:
    def of(section: type[Plugin]) -> dict[str, str | None]:
        return {name: field.description for name, field in section.model_fields.items()}

    kind = Plugin.model_fields["kind"].description
    assert kind is not None
    assert kind.startswith("Short name")
    shared = {"plain": "A number,\nover two lines.", "marked": "A field with a constraint."}
    assert of(Documented) == {"kind": None, **shared, "silent": None}
    assert of(Documented.Inner) == {"kind": None, "plain": "Of the inner class."}
    assert of(Derived) == {"kind": None, **shared, "silent": "No longer silent."}
    assert Documented.model_json_schema()["properties"]["marked"]["description"] == shared["marked"]


def test_fields_without_a_class_statement_have_no_help() -> None:
    made = create_model("Documented", __base__=Plugin, __module__=__name__, plain=(int, 1))
    assert made.model_fields["plain"].description is None
    typed = "class Typed(Plugin):\n    plain: int = 1\n    'Not in any file.'\n"
    exec(typed, space := {"Plugin": Plugin, "__name__": "typed"})
    assert space["Typed"].model_fields["plain"].description is None
