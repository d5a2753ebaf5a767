//! The tokens file: `{"input_ids": [..]}` or `{"sequences": [[..], ..]}`.

use std::path::Path;

use serde::Deserialize;

use crate::error::{Error, Result};

/// Token ids of one or several sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Ids, a list a sequence.
    pub sequences: Vec<Vec<i64>>,
    /// Whether the file spoke of `sequences`; the report then does so too.
    pub listed: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    input_ids: Option<Vec<i64>>,
    sequences: Option<Vec<Vec<i64>>>,
}

impl Tokens {
    /// Reads a tokens file.
    ///
    /// # Errors
    /// [`Error::Input`] naming the file and what it should hold.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::file(path, format_args!("cannot be read: {error}")))?;
        Tokens::parse(&text).map_err(|what| Error::file(path, what))
    }

    fn parse(text: &str) -> std::result::Result<Self, String> {
        const FORM: &str = r#"write {"input_ids": [..]} or {"sequences": [[..], ..]}"#;
        let file: File = serde_json::from_str(text).map_err(|error| format!("{error}; {FORM}"))?;
        match (file.input_ids, file.sequences) {
            (Some(ids), None) => Ok(Tokens {
                sequences: vec![ids],
                listed: false,
            }),
            (None, Some(sequences)) => Ok(Tokens {
                sequences,
                listed: true,
            }),
            (Some(_), Some(_)) => Err(format!("both input_ids and sequences are given; {FORM}")),
            (None, None) => Err(format!("neither input_ids nor sequences is given; {FORM}")),
        }
    }

    /// Number of tokens of every sequence.
    pub fn lengths(&self) -> Vec<usize> {
        self.sequences.iter().map(Vec::len).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        let one = Tokens::parse(r#"{"input_ids": [1, 2]}"#).unwrap();
        assert_eq!(
            one,
            Tokens {
                sequences: vec![vec![1, 2]],
                listed: false
            }
        );
        let several = Tokens::parse(r#"{"sequences": [[1], [2, 3]]}"#).unwrap();
        assert_eq!(several.lengths(), [1, 2]);
    }

    #[test]
    fn other_forms_are_refused_with_the_right_one() {
        for text in [
            "",
            "[1, 2]",
            "{}",
            r#"{"input_ids": [1.5]}"#,
            r#"{"ids": [1]}"#,
        ] {
            let refused = Tokens::parse(text).unwrap_err();
            assert!(
                refused.contains(r#"write {"input_ids": [..]}"#),
                "{text}: {refused}"
            );
        }
        let both = Tokens::parse(r#"{"input_ids": [1], "sequences": [[1]]}"#).unwrap_err();
        assert!(both.starts_with("both input_ids and sequences are given"));
    }
}
