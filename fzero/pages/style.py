"""The style of pages: for a light and a dark screen, for a desk and a phone."""

from fzero.pages.charts import COLOURS

_TONES = {
    "light": "4269d0 3ca951 ff725c efb118 a463f2 6cc5b0 97bbf5 9c6b4e ff8ab7 8d8d95".split(),
    "dark": "6f8fe8 4fbf66 ff8a76 d9a21b b683f5 58b3a0 6f93cf b58566 d9709b 77777f".split(),
}
_COLOURS = {
    "light": {"page": "#fff", "text": "#1b1b1f", "soft": "#666", "line": "#ddd", "tile": "#f4f4f6"},
    "dark": {"page": "#16161a", "text": "#e9e9ec", "soft": "#a0a0a8", "line": "#3a3a40", "tile": "#232328"},
}


def _list_variables(screen: str) -> str:
    colours = {**_COLOURS[screen], **{f"t{i}": f"#{tone}" for i, tone in enumerate(_TONES[screen])}}
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


STYLE = (
    f":root{{color-scheme:light dark;{_list_variables('light')}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_list_variables('dark')}}}}}"
    """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:1rem;font:15px/1.45 system-ui,sans-serif}
body{background:var(--page);color:var(--text)}
h1{font-size:1.4rem;margin:.2rem 0}
p{color:var(--soft);margin:.3rem 0;overflow-wrap:anywhere}
details{border-top:1px solid var(--line);padding:.6rem 0}
summary{font-weight:600;cursor:pointer}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(120px,1fr));gap:.5rem;margin:1rem 0}
.tiles div{background:var(--tile);border-radius:6px;padding:.5rem .7rem;color:var(--soft);font-size:13px}
.tiles b{display:block;color:var(--text);font-size:1.1rem}
svg{width:100%;height:auto;display:block;margin:.5rem 0}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.end{text-anchor:end}.middle{text-anchor:middle}
.grid,.cut{stroke:var(--line)}.cut{stroke:var(--page);stroke-width:1.5}.limit{stroke:var(--t2);stroke-dasharray:5 4}
.lane{fill:var(--tile)}.hover{fill:transparent}.hover:hover{fill:var(--text);fill-opacity:.15}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:13px}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
.wide,pre{overflow-x:auto}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:0 1.2rem}.pair>*{min-width:0}
table{border-collapse:collapse;font-size:13px;margin:.5rem 0}
th,td{text-align:left;padding:.15rem .8rem .15rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500}
.number{font-variant-numeric:tabular-nums;white-space:nowrap}
pre{font:12px/1.4 ui-monospace,monospace;background:var(--tile);padding:.7rem;border-radius:6px;max-height:34rem}
""" + "".join(f".c{i}{{fill:var(--t{i})}}.b{i}{{background:var(--t{i})}}" for i in range(COLOURS))
)
