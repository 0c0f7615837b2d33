"""Sphinx: the labels of the bibliography are those of the text, "Durbin and Koopman, 2012"."""

from pybtex.plugin import register_plugin
from pybtex.richtext import Text
from pybtex.style.formatting.unsrt import Style
from pybtex.style.labels import BaseLabelStyle


class AuthorYear(BaseLabelStyle):
    def format_labels(self, entries):
        for entry in entries:
            people = entry.persons.get("author") or entry.persons.get("editor") or []
            names = [
                str(Text.from_latex(" ".join([*who.prelast_names, *who.last_names])))
                for who in people
            ]
            if len(names) > 2:
                names = [f"{names[0]} et al."]
            who = " and ".join(names) or entry.fields.get("organization", entry.key)
            yield f"{who}, {entry.fields['year']}" if "year" in entry.fields else who


class AuthorYearStyle(Style):
    default_sorting_style = "author_year_title"
    default_label_style = AuthorYear


def setup(app):
    register_plugin("pybtex.style.formatting", "author_year", AuthorYearStyle)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
