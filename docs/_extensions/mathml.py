"""Shows formulas as MathML: no script, no font and no other host is needed."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def _visit_inline(translator: HTML5Translator, node: nodes.Element) -> None:
    formula = convert(node.astext(), display="inline")
    translator.body.append(f'<span class="formula">{formula}</span>')
    raise nodes.SkipNode


def _visit_block(translator: HTML5Translator, node: nodes.Element) -> None:
    formula = convert(node.astext(), display="block")
    translator.body.append(f'<div class="formula-block">{formula}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Makes it the renderer of formulas."""
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    app.config.html_math_renderer_name = "mathml"  # type: ignore[attr-defined]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
