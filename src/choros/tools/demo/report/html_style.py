"""The style sheet of the page: light or dark by the reader's setting, with rules for printing."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #59636e; --rule: #d5dade; --card: #f6f7f9;
  --accent: #0069a3; --good: #00694d; --good-paper: #dff3ea; --fast: #7a4b00; --fast-paper: #fbecd0; --bad: #a4221b;
  --bad-paper: #fbe6e4; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e8ebee; --soft: #a2acb6;
  --rule: #343b43; --card: #1c2126; --accent: #62b6e8; --good: #6fdcb3; --good-paper: #12382b; --fast: #f3c677;
  --fast-paper: #40300f; --bad: #ff9d94; --bad-paper: #43201d; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0 auto; max-width: 66rem; padding: 2.5rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 2.8rem 0 .4rem; padding-bottom: .3rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1.05rem; margin: 0 0 .2rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
a { color: var(--accent); text-decoration: none; }
a:hover, a:focus { text-decoration: underline; }
.lead { font-size: 1.1rem; }
.soft, figcaption, .about { color: var(--soft); font-size: .92rem; }
.banner { background: var(--bad-paper); color: var(--bad); padding: .6rem .9rem; border-radius: .4rem;
  max-width: none; }
dl.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .8rem 2rem;
  margin: 1.4rem 0 0; }
dl.facts div { border-top: 1px solid var(--rule); padding-top: .35rem; }
dl.facts dt { color: var(--soft); font-size: .8rem; }
dl.facts dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { padding: .42rem .45rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
table.main thead th, article thead th { white-space: normal; }
table.main tbody th { white-space: normal; }
th { color: var(--soft); font-weight: 600; font-size: .82rem; vertical-align: bottom; }
tbody th { color: var(--ink); font-size: inherit; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { padding-right: .1rem; }
table.main tbody tr:hover { background: var(--card); }
td.failed { text-align: left; white-space: normal; color: var(--bad); overflow-wrap: anywhere; }
.best { font-weight: 700; }
.badge { display: inline-block; margin-left: .45rem; padding: 0 .45rem; border-radius: 1rem; font-size: .74rem;
  font-weight: 600; line-height: 1.5; vertical-align: 1px; }
.badge.f1 { background: var(--good-paper); color: var(--good); }
.badge.time { background: var(--fast-paper); color: var(--fast); }
.badge.error { background: var(--bad-paper); color: var(--bad); }
figure { margin: 1.6rem 0 2.4rem; }
figure h3 { margin-bottom: 0; }
figcaption { margin-bottom: .6rem; }
figure svg text { fill: currentColor; }
figure svg { display: block; width: 100%; height: auto; max-width: 60rem; }
.narrow { display: none; }
@media screen and (max-width: 44rem) { .wide { display: none; } .narrow { display: block; }
  body { padding: 1.2rem 1rem 3rem; } h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
  table, tbody, tr, tbody th, caption { display: block; } thead { display: none; }
  tbody tr { border-bottom: 1px solid var(--rule); padding: .4rem 0; }
  tbody th, tbody td { border: 0; padding: .12rem 0; }
  tbody td { display: flex; justify-content: space-between; gap: 1rem; }
  tbody td[data-label]::before { content: attr(data-label); color: var(--soft); font-size: .85rem; } }
.cards { display: grid; gap: 1rem; margin-top: 1rem; }
.cards > *, .pair > * { min-width: 0; }
.pair { display: grid; grid-template-columns: minmax(0, 5fr) minmax(0, 9fr); gap: 1rem 1.5rem; align-items: start; }
@media screen and (max-width: 76rem) { .pair { grid-template-columns: minmax(0, 1fr); } }
article { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: .9rem 1rem; }
article p { margin: .1rem 0 .6rem; }
article table { font-size: .8rem; }
article thead th { font-size: .72rem; line-height: 1.2; }
article th, article td { padding: .22rem .3rem; }
caption { text-align: left; color: var(--soft); font-size: .76rem; padding-bottom: .1rem; }
code { font: .88em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--bad-paper); color: var(--ink); padding: .6rem .7rem; border-radius: .4rem;
  white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 18rem; overflow: auto; margin: .4rem 0; font-size: .8rem; }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; border-top: 1px solid var(--rule);
  padding-top: .6rem; }
@media print { body { max-width: none; padding: 0; font-size: 10.5pt; } h2 { break-after: avoid; }
  figure, article, tr { break-inside: avoid; } pre { max-height: none; }
  .pair { grid-template-columns: minmax(0, 1fr); gap: .5rem; }
  th, td { padding: .25rem .35rem; } table { font-size: 8.5pt; }
  article table { font-size: 8pt; }
  article th { white-space: normal; } .badge { border: 1px solid currentColor; } }
"""
