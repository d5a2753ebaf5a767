//! Rules about the text of the sources.

use crate::repository::{Text, none, texts};

/// Longest source file, in lines: what can be read in one sitting.
const LINES_MAX: usize = 800;

/// Files that people write.
const WRITTEN: &[&str] = &[
    ".rs", ".py", ".cu", ".cuh", ".toml", ".md", ".sh", "ci/test", ".ci/run",
];

/// `unsafe` outside the kernels, with the reason.
const UNSAFE_ELSEWHERE: &[(&str, &str)] = &[
    (
        "stack/m3-checkpoint/src/shard.rs",
        "maps a file that may be larger than memory",
    ),
    (
        "harness/m3-bench/benches/gemm.rs",
        "calls the crate that our product is timed beside",
    ),
];

fn sources() -> Vec<Text> {
    texts(&[".rs"])
}

/// Lines of code, without comments.
fn code(file: &Text) -> impl Iterator<Item = (usize, &str)> {
    file.lines()
        .map(|(number, line)| (number, line.split("//").next().unwrap_or_default()))
}

fn has_word(line: &str, word: &str) -> bool {
    let part_of_name = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + word.len()..]);
        !before.ends_with(part_of_name) && !after.starts_with(part_of_name)
    })
}

#[test]
fn files_are_short_enough_to_be_read() {
    let long = texts(WRITTEN)
        .into_iter()
        .filter(|file| file.text.lines().count() > LINES_MAX);
    let complaints: Vec<_> = long
        .map(|file| format!("{}: over {LINES_MAX} lines; split it", file.path))
        .collect();
    none(&complaints);
}

#[test]
fn unsafe_code_stands_in_the_kernels_alone() {
    let mut complaints = Vec::new();
    for file in sources().iter().filter(|file| !file.lies_in("kernels")) {
        let excused = UNSAFE_ELSEWHERE.iter().any(|(path, _)| *path == file.path);
        let word = concat!("un", "safe");
        let found = code(file)
            .filter(|(_, line)| has_word(line, word))
            .map(|(number, _)| number);
        let found: Vec<usize> = found.collect();
        match found.first() {
            Some(number) if !excused => complaints.push(format!("{}:{number}: {word}", file.path)),
            None if excused => complaints.push(format!("{} no longer needs its entry", file.path)),
            _ => {}
        }
    }
    none(&complaints);
}

#[test]
fn no_test_is_switched_off_and_no_work_is_promised() {
    let words = [
        concat!("#[", "ignore"),
        concat!("TO", "DO"),
        concat!("todo", "!("),
        concat!("dbg", "!("),
    ];
    let mut complaints = Vec::new();
    for file in sources() {
        for (number, line) in file.lines() {
            let found = words.iter().filter(|word| line.contains(*word));
            complaints.extend(found.map(|word| format!("{}:{number}: {word}", file.path)));
        }
    }
    none(&complaints);
}

#[test]
fn no_file_speaks_of_one_persons_machine() {
    let folders = [
        concat!("/ho", "me/"),
        concat!("/ro", "ot/"),
        concat!("/Us", "ers/"),
        concat!("/wo", "rk/"),
        concat!("/tm", "p/"),
    ];
    let mut complaints = Vec::new();
    let endings = [WRITTEN, &[".json", ".snap", ".txt", ".lock"]].concat();
    for file in texts(&endings) {
        for (number, line) in file.lines() {
            let found = folders.iter().filter(|folder| line.contains(*folder));
            complaints.extend(found.map(|folder| format!("{}:{number}: {folder}", file.path)));
        }
    }
    none(&complaints);
}

#[test]
fn no_snapshot_waits_for_a_decision() {
    let waiting = texts(&[".snap.new", ".pending-snap"]);
    let complaints: Vec<_> = waiting
        .iter()
        .map(|file| format!("{}: accept or remove it", file.path))
        .collect();
    none(&complaints);
}
