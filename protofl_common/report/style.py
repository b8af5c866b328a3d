"""How the page looks, one column or two from 900 pixels on, and what the browser may do with it.

A box that goes on to a side has a shadow there: it scrolls out of sight under the box's own
background, which moves with the content.
"""

CSS = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1c2430;
--soft:#5b6675;--line:#dfe3e8;--link:#0b5cad;--edge:#0005}
@media (prefers-color-scheme:dark){:root{--page:#12161c;--card:#1b212a;--ink:#e6eaf0;
--soft:#a3adba;--line:#313a46;--link:#7db8f0;--edge:#fff5}.leak{color:#ff8a80!important}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:12px}
h1{font-size:1.6rem;line-height:1.2;margin:.3em 0 .1em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:1.6em 0 .6em}
h3{font-size:1rem;margin:0 0 .4em}
.sub{color:var(--soft);margin:0 0 .8em;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:.3em 1.1em}
a{color:var(--link)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(118px,1fr));gap:10px;
margin-bottom:12px}
.tiles div,figure,.card,details,.note{background:var(--card);
border:1px solid var(--line);border-radius:8px}
.tiles div{padding:10px 12px}
.tiles b{display:block;font-size:1.2rem;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:.85rem}
.figures{display:grid;grid-template-columns:minmax(0,1fr);gap:14px}
figure{margin:0;padding:10px;min-width:0}
figure svg{display:block;width:100%;height:auto;max-width:560px;margin:0 auto}
figure svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif!important;
fill:currentColor}
figure svg text[style*="fill"]{fill:revert}
g[id*="class-name"] text{paint-order:stroke;stroke:var(--card);stroke-width:2.5px;
stroke-linejoin:round}
figcaption,.above{color:var(--soft);font-size:.88rem;text-align:left}
figcaption{margin-top:.5em}
.above{margin:0;padding:8px 10px 2px}
.box{overflow-x:auto;max-width:100%;
background:linear-gradient(90deg,var(--card) 50%,transparent) left/40px 100% no-repeat local,
linear-gradient(270deg,var(--card) 50%,transparent) right/40px 100% no-repeat local,
linear-gradient(90deg,var(--edge),transparent) left/14px 100% no-repeat scroll,
linear-gradient(270deg,var(--edge),transparent) right/14px 100% no-repeat scroll}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:right;border-top:1px solid var(--line);white-space:nowrap}
thead th,thead td{border-top:0;color:var(--soft);font-weight:600}
th:first-child,td:first-child,table.words th,table.words td{text-align:left}
table.words td:last-child{white-space:normal;overflow-wrap:anywhere;min-width:7em}
details{padding:8px 12px}
details .card{border:0}
.card+.card,.card+details{margin-top:10px}
summary{cursor:pointer}
.note{padding:8px 12px;margin:.6em 0}
.leak{color:#b3261e;border-color:currentColor;font-weight:600}
.gain{font-size:1.15rem;font-weight:600}
.card+.tiles{margin-top:12px}
footer{color:var(--soft);font-size:.85rem;margin:2em 0 1em}
@media (max-width:500px){th,td{padding:5px 4px}}
@media (min-width:900px){main{padding:24px}.figures{grid-template-columns:repeat(2,minmax(0,1fr))}
figure:last-child:nth-child(odd){grid-column:1/-1}}
@media print{body{background:#fff}figure{break-inside:avoid}}
"""
POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
)
"""The browser loads nothing from anywhere and runs no script, whatever the clients' names are."""
