//! The shell of a self-contained page: no script, no font, no address but its own.

const STYLE: &str = "\
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2126;--muted:#5b6570;--line:#d9dee3;--card:#f6f7f8;\
--good:#186a3b;--bad:#b3261e;--warn:#7a5d00;--s0:#0b62b5;--s1:#c2570c;--s2:#8a94a0;--gap:#b3261e33;--hover:#5b657022}\
@media(prefers-color-scheme:dark){:root{--bg:#13171b;--fg:#e4e8ec;--muted:#9aa5b1;--line:#333b43;--card:#1b2127;\
--good:#6fce94;--bad:#ff8a80;--warn:#e0bd55;--s0:#6cb2f7;--s1:#f5a15c;--s2:#6d7884;--gap:#ff8a8040;--hover:#9aa5b12b}}\
*{box-sizing:border-box}\
body{background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif;max-width:74rem;margin:1.5rem auto;padding:0 1rem}\
h1{font-size:1.5rem;margin:0 0 .5rem}h2{font-size:1.15rem;margin:2rem 0 .6rem}h3{font-size:.95rem;margin:0}\
table{border-collapse:collapse;width:100%}td,th{padding:.25rem .6rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}\
th{color:var(--muted);font-weight:600}\
pre{background:var(--card);padding:.8rem;overflow-x:auto;font-size:13px}\
.PASS{color:var(--good)}.FAIL,.ERROR{color:var(--bad);font-weight:600}.WAIVED,.INACTIVE,.SKIP{color:var(--warn)}\
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.muted{color:var(--muted)}\
@media(max-width:46rem){td,th{padding:.25rem .4rem}td:first-child,th:first-child{padding-left:0}}.scroll{overflow-x:auto}details{margin:.3rem 0}summary{cursor:pointer}\
figure{margin:0;min-width:0}svg{display:block;width:100%;max-width:34rem;height:auto;font-size:11px}\
svg text{fill:var(--muted)}svg .grid{stroke:var(--line)}.bar{fill:var(--s2)}";

/// A whole document; `title` is text, `style` and `body` are trusted.
pub(crate) fn page(title: &str, style: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>{}</title><style>{STYLE}{style}</style></head><body>\n{body}</body></html>\n",
        escape(title)
    )
}

/// Text as it may stand in an element or a quoted attribute.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            _ => escaped.push(c),
        }
    }
    escaped
}
