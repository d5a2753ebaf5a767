//! What a gate file may say, and the exact words with which everything else is refused.

use m3_gate::{Date, GateSet, Metric, Op, Severity, Source, Storage, parse_gates};

const TODAY: Date = Date {
    year: 2026,
    month: 12,
    day: 1,
};
const ANALYTIC: &str = "source = { kind = \"analytic\", why = \"one rounding\" }";

const WHOLE: &str = r#"
[[gate]]
id = "op.o.err_ratio"
tensor = ["o", "d?"]
metric = "err_ratio"
op = "<="
bound = 2.0
cases = "op::*"
arch = "cpu"
dtype = "bf16"
severity = "shadow"
floor = { abs = 1e-6, why = "fp32 sums" }
small = "one token has 512 elements"

[gate.source]
kind = "measured"
commit = "abc1234"
device = "H200"
n = 200
rule = "p99.9 x 1.5"
until = 2026-12-01

[[gate]]
id = "grad_norm"
metric = "value"
op = "<="
bound = 1e-5
cases = "*"
source = { kind = "seed", doc = "001", why = "two sums of one gradient" }
band = { rel = 0.1, floor = 1e-3, history_min = 10, source = { kind = "literature", cite = "x" } }

[[waiver]]
gate = "op.o.err_ratio"
cases = "op::bf16/t1_*"
issue = "https://example.org/7"
until = 2027-01-31
why = "tail tile"
"#;

/// The refusal of a gate made of these lines.
fn refusal(lines: &str) -> String {
    parse_gates("g.toml", lines, TODAY).unwrap_err().to_string()
}

/// The refusal of a good gate with `bad` in place of the line that sets the same key.
fn refusal_with(bad: &str) -> String {
    let key = bad.split([' ', '=']).next().unwrap();
    let good = [
        "id = \"a\"",
        "tensor = \"o\"",
        "metric = \"max_abs\"",
        "op = \"<=\"",
        "bound = 1",
        "cases = \"*\"",
        ANALYTIC,
    ];
    let mut lines: Vec<&str> = good
        .into_iter()
        .filter(|line| !line.starts_with(&format!("{key} =")))
        .collect();
    if bad.contains('=') {
        lines.push(bad);
    }
    refusal(&format!("[[gate]]\n{}\n", lines.join("\n")))
}

#[test]
fn a_gate_file_is_read_whole() {
    let file = parse_gates("op.toml", WHOLE, TODAY).unwrap();
    let gate = &file.gates[0];
    assert_eq!(
        (gate.id.as_str(), gate.at.as_str()),
        ("op.o.err_ratio", "op.toml:2")
    );
    assert_eq!(gate.metric, Metric::ErrRatio);
    let tensor = gate.tensor.as_ref().unwrap();
    assert!(tensor.matches("o") && tensor.matches("dk") && !tensor.matches("lse"));
    let limit = gate.limit.as_ref().unwrap();
    assert_eq!(
        (limit.op, limit.bound, limit.literal.as_str()),
        (Op::Le, 2.0, "2.0")
    );
    assert_eq!(limit.severity, Severity::Shadow);
    assert!(matches!(&limit.source, Source::Measured { n: 200, until, .. } if *until == TODAY));
    assert_eq!(gate.ratio_terms().floor, 1e-6);
    assert!(gate.ratio_terms().small);
    assert!(gate.applies("op::bf16/t1", "cpu", Storage::Bf16));
    assert!(!gate.applies("op::f32/t1", "cpu", Storage::F32));
    assert!(!gate.applies("op::bf16/t1", "sm_90a", Storage::Bf16));
    let (limit, band) = (
        file.gates[1].limit.as_ref(),
        file.gates[1].band.as_ref().unwrap(),
    );
    assert_eq!(limit.unwrap().severity, Severity::Block);
    assert_eq!((band.severity, band.history_min), (Severity::Shadow, 10));
    assert_eq!(file.waivers[0].issue, "https://example.org/7");
}

#[test]
fn an_unknown_key_is_refused_with_the_key_that_was_meant() {
    assert_eq!(
        refusal_with("boud = 1"),
        "g.toml:9: unknown key `boud`; did you mean `bound`?"
    );
    assert_eq!(
        refusal_with("tolerance = 1"),
        "g.toml:9: unknown key `tolerance`; a gate takes id, tensor, metric, op, bound, cases, \
         arch, dtype, severity, source, floor, small, band"
    );
    assert_eq!(
        refusal("[[gates]]\n"),
        "g.toml:1: unknown key `gates`; did you mean `gate`?"
    );
    assert_eq!(
        refusal_with("source = { kind = \"analytic\", why = \"x\", cite = \"y\" }"),
        "g.toml:8: unknown key `cite`; the source of gate `a` takes kind, why"
    );
}

#[test]
fn a_bound_without_a_source_is_refused() {
    assert_eq!(
        refusal_with("source"),
        "g.toml:1: gate `a` has a bound and no source; say where the bound comes from: \
         source = { kind = \"analytic\", why = \"...\" }"
    );
    assert_eq!(
        refusal_with("source = { kind = \"analytic\", why = \"  \" }"),
        "g.toml:8: `why` is empty; it must be words"
    );
    assert_eq!(
        refusal_with("source = { kind = \"seed\" }"),
        "g.toml:8: the source of gate `a` without `doc`; the document and the place in it"
    );
    assert_eq!(
        refusal_with("source = { kind = \"guess\" }"),
        "g.toml:8: `kind` cannot be `guess`; it is one of analytic, seed, literature, measured"
    );
}

#[test]
fn an_expired_measurement_is_refused() {
    let measured = |until: &str| {
        format!(
            "source = {{ kind = \"measured\", commit = \"c\", device = \"d\", n = 3, rule = \"r\", \
             until = {until} }}"
        )
    };
    assert_eq!(
        refusal_with(&measured("2026-11-30")),
        "g.toml:8: gate `a`: the measured bound expired on 2026-11-30 (today is 2026-12-01); \
         measure it again"
    );
    assert_eq!(
        refusal_with(&measured("\"2027-01-01\"")),
        "g.toml:8: `until` must be a date such as 2027-01-31, got string"
    );
    assert_eq!(
        refusal_with("source = { kind = \"measured\", n = 3 }"),
        "g.toml:8: the source of gate `a` without `until`; a measurement ends: until = 2027-01-31"
    );
}

#[test]
fn every_needed_key_is_asked_for() {
    for (key, message) in [
        (
            "id",
            "g.toml:1: a gate without `id`; it names the gate in reports: id = \"msa_attention.o.rms\"",
        ),
        (
            "tensor",
            "g.toml:1: gate `a` without `tensor`; say which it judges: tensor = \"o\"",
        ),
        (
            "metric",
            "g.toml:1: gate `a` without `metric`; say what is measured: metric = \"norm_rel\"",
        ),
        (
            "op",
            "g.toml:1: gate `a` without `op`; say how the bound binds: op = \"<=\"",
        ),
        (
            "bound",
            "g.toml:1: gate `a` without `bound`; a relation, severity or source needs its bound",
        ),
        (
            "cases",
            "g.toml:1: gate `a` without `cases`; say which: cases = \"op::*\"",
        ),
    ] {
        assert_eq!(refusal_with(key), message);
    }
    assert_eq!(
        refusal("[[gate]]\nid = \"a\"\nmetric = \"value\"\ncases = \"*\"\n"),
        "g.toml:1: gate `a` judges nothing; give it `op` and `bound`, or a `band`"
    );
}

#[test]
fn words_outside_a_closed_set_are_refused() {
    assert_eq!(
        refusal_with("metric = \"max_ab\""),
        "g.toml:8: `metric` cannot be `max_ab`; did you mean `max_abs`?"
    );
    assert_eq!(
        refusal_with("op = \"<\""),
        "g.toml:8: `op` cannot be `<`; did you mean `<=`?"
    );
    assert_eq!(
        refusal_with("severity = \"warn\""),
        "g.toml:9: `severity` cannot be `warn`; it is one of block, shadow"
    );
}

#[test]
fn bounds_that_cannot_bind_are_refused() {
    assert_eq!(
        refusal_with("op = \">=\""),
        "g.toml:5: gate `a`: `max_abs >= 1` asks for an error; use <="
    );
    for (bad, why) in [
        (
            "bound = nan",
            "`max_abs <= nan` is no bound: it must be a finite number",
        ),
        (
            "bound = inf",
            "`max_abs <= inf` is no bound: it must be a finite number",
        ),
        (
            "bound = -1e-3",
            "`max_abs <= -1e-3` can never hold: an error is not negative",
        ),
    ] {
        assert_eq!(refusal_with(bad), format!("g.toml:8: gate `a`: {why}"));
    }
    assert_eq!(
        refusal_with("bound = \"1\""),
        "g.toml:8: `bound` must be a decimal number, got string"
    );
    let rate = |op: &str, bound: &str| {
        refusal(&format!(
            "[[gate]]\nid=\"a\"\ntensor=\"o\"\nmetric=\"agree_rate\"\nop=\"{op}\"\nbound={bound}\n\
             cases=\"*\"\n{ANALYTIC}\n"
        ))
    };
    assert_eq!(
        rate("<=", "0.9"),
        "g.toml:6: gate `a`: `agree_rate <= 0.9` asks for disagreement; use >="
    );
    assert_eq!(
        rate(">=", "99.997"),
        "g.toml:6: gate `a`: `agree_rate >= 99.997` is outside of what a share can be asked for: \
         above 0, at most 1"
    );
}

#[test]
fn keys_of_ratios_are_refused_elsewhere() {
    assert_eq!(
        refusal_with("small = \"few\""),
        "g.toml:9: gate `a`: `small` means nothing for max_abs; only the ratios to the twin's error take it"
    );
    assert_eq!(
        refusal_with("floor = { abs = 1.0, why = \"x\" }"),
        "g.toml:9: gate `a`: `floor` means nothing for max_abs; max_rel, norm_rel, rms_ratio and err_ratio take it"
    );
    assert_eq!(
        refusal_with("metric = \"value\""),
        "g.toml:3: gate `a`: `tensor` means nothing for value; a value is handed in by the caller"
    );
}

#[test]
fn a_floor_needs_a_size_and_a_reason() {
    let floor = |text: &str| {
        refusal(&format!(
            "[[gate]]\nid=\"a\"\ntensor=\"o\"\nmetric=\"err_ratio\"\nop=\"<=\"\nbound=2\ncases=\"*\"\n\
             {ANALYTIC}\nfloor = {text}\n"
        ))
    };
    assert_eq!(
        floor("{ abs = 1e-6 }"),
        "g.toml:9: the floor of gate `a` without `why`; say why this much is granted: why = \"...\""
    );
    assert_eq!(
        floor("{ abs = 0.0, why = \"x\" }"),
        "g.toml:9: `abs` is 0.0; it must be finite and above 0"
    );
    assert_eq!(
        floor("1e-6"),
        "g.toml:9: `floor` must be a table, got float"
    );
}

#[test]
fn a_band_blocks_only_once_it_is_promoted() {
    let band = |extra: &str| {
        format!(
            "[[gate]]\nid=\"a\"\nmetric=\"value\"\ncases=\"*\"\n[gate.band]\nrel=0.1\nfloor=1e-3\n\
             history_min=3\n{ANALYTIC}\n{extra}"
        )
    };
    assert_eq!(
        refusal(&band("severity = \"block\"\n")),
        "g.toml:5: gate `a`: a band starts in shadow; to let it block, say since when it has been \
         quiet: promoted = \"...\""
    );
    let promoted = band("severity = \"block\"\npromoted = \"30 quiet nights\"\n");
    let file = parse_gates("g.toml", &promoted, TODAY).unwrap();
    assert_eq!(
        file.gates[0].band.as_ref().unwrap().severity,
        Severity::Block
    );
    let sourceless = band("").replace(ANALYTIC, "");
    assert!(
        refusal(&sourceless)
            .starts_with("g.toml:5: the band of gate `a` has a bound and no source")
    );
}

#[test]
fn a_waiver_needs_an_issue_and_an_end() {
    let waiver = |lines: &str| {
        refusal(&format!(
            "[[gate]]\nid=\"abc\"\ntensor=\"o\"\nmetric=\"max_abs\"\nop=\"<=\"\nbound=1\ncases=\"*\"\n\
             {ANALYTIC}\n[[waiver]]\ncases=\"*\"\n{lines}\n"
        ))
    };
    assert_eq!(
        waiver("gate=\"abc\"\nuntil=2027-01-01"),
        "g.toml:9: the waiver of `abc` without `issue`; name where it is being mended: issue = \"...\""
    );
    assert_eq!(
        waiver("gate=\"abc\"\nissue=\"#7\""),
        "g.toml:9: the waiver of `abc` without `until`; a waiver ends: until = 2027-01-31"
    );
    assert_eq!(
        waiver("gate=\"abc\"\nissue=\"#7\"\nuntil=2026-11-30"),
        "g.toml:13: the waiver of `abc` expired on 2026-11-30 (today is 2026-12-01); mend #7 or \
         renew the waiver"
    );
    assert_eq!(
        waiver("gate=\"abd\"\nissue=\"#7\"\nuntil=2027-01-01"),
        "g.toml:11: the waiver names gate `abd`, which this file does not have; did you mean `abc`?"
    );
}

#[test]
fn an_id_stands_once_over_all_files() {
    let one = format!(
        "[[gate]]\nid=\"a\"\ntensor=\"o\"\nmetric=\"max_abs\"\nop=\"<=\"\nbound=1\ncases=\"*\"\n{ANALYTIC}\n"
    );
    assert_eq!(
        refusal(&format!("{one}{one}")),
        "g.toml:9: gate id `a` stands already at g.toml:1; ids are unique over all files"
    );
    let files = ["x.toml", "y.toml"].map(|name| parse_gates(name, &one, TODAY).unwrap());
    assert_eq!(
        GateSet::new(files).unwrap_err().to_string(),
        "y.toml:1: gate id `a` stands already at x.toml:1; ids are unique over all files"
    );
}

#[test]
fn a_reason_over_several_lines_is_read_as_one() {
    let text = "[[gate]]\nid=\"a\"\ntensor=\"o\"\nmetric=\"max_abs\"\nop=\"<=\"\nbound=1\ncases=\"*\"\n\
         [gate.source]\nkind=\"analytic\"\nwhy=\"\"\"one\n  two\"\"\"\n";
    let file = parse_gates("g.toml", text, TODAY).unwrap();
    let source = &file.gates[0].limit.as_ref().unwrap().source;
    assert_eq!(source.to_string(), "analytic, one two");
}

#[test]
fn broken_toml_names_its_line() {
    let message = refusal("[[gate]]\nid = \"a\"\nbound = = 1\n");
    assert!(message.starts_with("g.toml:3: not TOML: "), "{message}");
}

#[test]
fn the_literal_text_moves_with_the_judgement_and_not_with_its_reason() {
    let text = |toml: &str| parse_gates("g.toml", toml, TODAY).unwrap().gates[0].literal_text();
    let same = WHOLE
        .replace("fp32 sums", "another reason")
        .replace("abc1234", "def5678");
    assert_eq!(text(WHOLE), text(&same));
    for (from, to) in [
        ("bound = 2.0", "bound = 2.5"),
        ("\"o\", ", ""),
        ("abs = 1e-6", "abs = 1e-5"),
    ] {
        assert_ne!(text(WHOLE), text(&WHOLE.replacen(from, to, 1)), "{from}");
    }
}
