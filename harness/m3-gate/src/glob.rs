//! Patterns over names: `*` any run of characters, `?` one character, a leading `!` takes names
//! out again, nothing else is special.

/// Patterns; a name matches when one of them does and none with a leading `!` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patterns(Vec<String>);

impl Patterns {
    /// The patterns of a gate, in the order of the file.
    pub fn new(patterns: Vec<String>) -> Self {
        Patterns(patterns)
    }

    /// Matches every name.
    pub fn any() -> Self {
        Patterns(vec!["*".to_owned()])
    }

    /// True when a pattern covers the whole of `name` and no `!` pattern does.
    pub fn matches(&self, name: &str) -> bool {
        let covers = |pattern: &str| matches(pattern.as_bytes(), name.as_bytes());
        let out = |pattern: &String| pattern.strip_prefix('!').is_some_and(covers);
        let taken = |pattern: &String| !pattern.starts_with('!') && covers(pattern);
        self.0.iter().any(taken) && !self.0.iter().any(out)
    }

    /// The patterns, joined by commas.
    pub fn text(&self) -> String {
        self.0.join(",")
    }
}

/// Linear in `name` per star: only the last star is ever revisited.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&b'*') {
            retry = Some((p + 1, n));
            p += 1;
        } else if pattern.get(p).is_some_and(|&c| c == b'?' || c == name[n]) {
            p += 1;
            n += 1;
        } else if let Some((after_star, taken)) = retry {
            retry = Some((after_star, taken + 1));
            p = after_star;
            n = taken + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

/// The candidate nearest to `word`, if one is near enough to have been meant.
pub(crate) fn did_you_mean<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let reach = (word.len() / 3).clamp(1, 3);
    let nearest = candidates
        .iter()
        .map(|c| (edit_distance(word, c), *c))
        .min()?;
    (nearest.0 <= reach).then_some(nearest.1)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_cover_runs_and_question_marks_one_character() {
        let covers = |pattern: &str, name| Patterns::new(vec![pattern.into()]).matches(name);
        assert!(covers("*", ""));
        assert!(covers("d?", "dk") && !covers("d?", "d") && !covers("d?", "dkv"));
        assert!(covers("msa_attention::*", "msa_attention::bf16/t129"));
        assert!(covers("*/t*_b128*", "msa_attention::bf16/t4099_b128"));
        assert!(covers("*ab", "aaab") && !covers("*ab", "aaaba"));
        assert!(!covers("o", "out"));
    }

    #[test]
    fn an_exclamation_mark_takes_names_out() {
        let patterns = Patterns::new(vec!["!*/edge_*".into(), "op::*".into()]);
        assert!(patterns.matches("op::bf16/t129"));
        assert!(!patterns.matches("op::bf16/edge_t1") && !patterns.matches("other::f32/t1"));
        assert!(
            !Patterns::new(vec!["!a".into()]).matches("b"),
            "nothing was taken in"
        );
    }

    #[test]
    fn a_near_word_is_offered_and_a_far_one_is_not() {
        assert_eq!(did_you_mean("bond", &["bound", "id"]), Some("bound"));
        assert_eq!(
            did_you_mean("severty", &["severity", "source"]),
            Some("severity")
        );
        assert_eq!(did_you_mean("tolerance", &["bound", "id"]), None);
    }
}
