"""The page's style sheet. Every meaning that a colour has is also said by a word, a line or a weight."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f8; --card: #ffffff; --text: #1b2126; --muted: #5b6670; --line: #dde2e6; --faint: #eef1f3;
  --trained: #d5efe6; --trained-line: #00805e; --break: #fde3d3; --break-line: #c24e00; --bar: #6d8fb3; --mark: #1b2126;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121518; --card: #1a1f23; --text: #e5e9ec; --muted: #9aa6b0; --line: #323a41; --faint: #242b31;
    --trained: #12392f; --trained-line: #35c79d; --break: #4a2812; --break-line: #ff9a55; --bar: #5f87b0;
    --mark: #e5e9ec;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 80px; }
header p { max-width: 760px; margin: 8px 0 0; font-size: 17px; }
h1 { margin: 2px 0 0; font-size: 28px; line-height: 1.2; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 44px 0 6px; font-size: 19px; letter-spacing: -0.005em; }
h3 { margin: 0; font-size: 14px; font-weight: 600; }
.eyebrow, .lead, .note, small { color: var(--muted); }
.eyebrow { font-size: 13px; letter-spacing: 0.02em; }
.lead { margin: 0 0 14px; max-width: 760px; }
.note { margin: 12px 0; padding: 10px 14px; border-left: 3px solid var(--break-line); background: var(--card);
  color: var(--text); border-radius: 0 6px 6px 0; max-width: 860px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin: 26px 0 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px 13px; }
.tile b { display: block; font-size: 26px; line-height: 1.2; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th, td { padding: 7px 14px; text-align: left; border-bottom: 1px solid var(--faint); vertical-align: middle; }
th { color: var(--muted); font-weight: 500; font-size: 13px; border-bottom-color: var(--line); white-space: nowrap;
  vertical-align: bottom; }
tr:last-child > td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td > small { display: inline-block; min-width: 180px; }
td.n > small { min-width: 0; }
td.name { font-weight: 600; white-space: nowrap; }
tr.chosen td { background: var(--faint); }
.bar { position: relative; display: block; min-width: 90px; height: 12px; background: var(--faint);
  border-radius: 3px; }
.bar i { position: absolute; inset: 0 auto 0 0; background: var(--bar); border-radius: 3px; }
.bar s { position: absolute; top: -3px; bottom: -3px; width: 0; border-left: 2px solid var(--mark); }
.with { display: grid; grid-template-columns: 1fr 44px; gap: 10px; align-items: center; }
.pill { display: inline-block; margin-right: 4px; padding: 0 8px; border-radius: 9px; border: 1px solid var(--break-line);
  color: var(--break-line); font-size: 12px; line-height: 18px; font-weight: 600; white-space: nowrap; }
a { color: inherit; text-decoration-color: var(--muted); text-underline-offset: 3px; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 10px 0; }
details > div { scroll-margin-top: 64px; padding: 2px 18px 16px; border-top: 1px solid var(--line); }
summary { padding: 10px 16px; cursor: pointer; }
summary b { margin-right: 8px; overflow-wrap: anywhere; }
summary small { margin-right: 8px; font-size: 13.5px; }
summary:focus-visible { outline: 2px solid var(--bar); outline-offset: 2px; border-radius: 10px; }
.sample { margin: 24px 0 0; }
details .lead { margin: 12px 0 0; }
.sample > h3 small { font-weight: 400; margin-left: 6px; }
.tokens, .side { font: 13px/1.85 ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens { margin: 8px 0 0; padding: 12px 14px; border: 1px solid var(--line); border-radius: 8px; }
.tokens i, .tokens b, .tokens u, .side i, .side b, .side u { font-style: normal; font-weight: 400;
  text-decoration: none; unicode-bidi: isolate; padding: 1px 0; }
.tokens i, .side i { color: var(--muted); border-left: 1px solid var(--faint); }
.tokens b { background: var(--trained); border-bottom: 2px solid var(--trained-line);
  border-left: 1px solid var(--card); font-weight: 600; }
.tokens u, .side u { background: var(--break); outline: 1px dashed var(--break-line); outline-offset: -1px;
  border-left: 1px solid var(--card); border-radius: 2px; }
.side u { outline-style: solid; }
.call { font: 600 11px/1 system-ui, sans-serif; color: var(--trained-line); border: 1px solid var(--trained-line);
  border-radius: 7px; padding: 1px 5px; margin: 0 4px 0 6px; vertical-align: 1px; cursor: help; white-space: nowrap; }
.cut { margin: 0 4px 0 2px; font-family: system-ui, sans-serif; }
.fold { font: 12px/1 system-ui, sans-serif; color: var(--muted); background: var(--faint); border-radius: 7px;
  padding: 2px 8px; margin: 0 4px; }
.break { margin: 12px 0 0; padding: 10px 14px 12px; border: 1px solid var(--line);
  border-left: 3px solid var(--break-line); border-radius: 0 8px 8px 0; }
.break p { margin: 0 0 6px; font-size: 14px; }
.break p .pill { margin-right: 8px; }
.side { display: grid; grid-template-columns: 110px 1fr; gap: 12px; }
.side > span:first-child { font: 13px/1.9 system-ui, sans-serif; color: var(--muted); overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 10px 26px; padding: 10px 14px; }
.legend span { white-space: nowrap; }
.legend .tokens { display: inline; padding: 0; margin: 0 6px 0 0; border: 0; }
.legend .call, .legend .fold, .legend .pill { margin: 0 6px 0 0; }
@media (max-width: 640px) { .side { grid-template-columns: 1fr; gap: 0; } main { padding: 24px 14px 60px; } }
"""
