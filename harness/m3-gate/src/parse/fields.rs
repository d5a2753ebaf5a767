//! Typed reads from a TOML table that know which line they stand on.

use super::{GateError, GateFault};
use crate::glob::{Patterns, did_you_mean};
use crate::source::Date;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A gate file and the day it is read on.
pub(super) struct File<'a> {
    pub name: &'a str,
    pub text: &'a str,
    pub today: Date,
}

impl<'a> File<'a> {
    pub fn parse(&self) -> Result<DeTable<'a>, GateError> {
        let parsed = DeTable::parse(self.text).map(Spanned::into_inner);
        parsed.map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            let fault = GateFault::Syntax {
                message: error.message().to_owned(),
            };
            GateError {
                at: self.at(start),
                fault,
            }
        })
    }

    fn at(&self, offset: usize) -> String {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        format!(
            "{}:{}",
            self.name,
            1 + before.iter().filter(|&&b| b == b'\n').count()
        )
    }
}

/// One table, with the name that messages give it.
pub(super) struct Fields<'a> {
    file: &'a File<'a>,
    name: String,
    table: &'a DeTable<'a>,
    span: Range<usize>,
}

impl<'a> Fields<'a> {
    pub fn new(
        file: &'a File<'a>,
        name: String,
        table: &'a DeTable<'a>,
        span: Range<usize>,
    ) -> Self {
        Fields {
            file,
            name,
            table,
            span,
        }
    }

    /// The same table under a name that says which one it is.
    pub fn named(&self, name: String) -> Self {
        Fields {
            file: self.file,
            name,
            table: self.table,
            span: self.span.clone(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn today(&self) -> Date {
        self.file.today
    }

    pub fn at(&self) -> String {
        self.file.at(self.span.start)
    }

    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    pub fn fault(&self, fault: GateFault) -> GateError {
        GateError {
            at: self.at(),
            fault,
        }
    }

    /// A fault on the line of `key`.
    pub fn fault_at(&self, key: &str, fault: GateFault) -> GateError {
        let start = self
            .table
            .get(key)
            .map_or(self.span.start, |value| value.span().start);
        GateError {
            at: self.file.at(start),
            fault,
        }
    }

    pub fn missing(&self, key: &'static str, hint: &'static str) -> GateError {
        self.fault(GateFault::MissingKey {
            table: self.name.clone(),
            key,
            hint,
        })
    }

    pub fn need<T>(
        &self,
        value: Option<T>,
        key: &'static str,
        hint: &'static str,
    ) -> Result<T, GateError> {
        value.ok_or_else(|| self.missing(key, hint))
    }

    pub fn refuse_unknown(&self, known: &[&str]) -> Result<(), GateError> {
        let unknown = self
            .table
            .keys()
            .filter(|key| !known.contains(&key.get_ref().as_ref()));
        let Some(key) = unknown.min_by_key(|key| key.span().start) else {
            return Ok(());
        };
        let word = key.get_ref().to_string();
        let hint = meant(&word, known)
            .unwrap_or_else(|| format!("{} takes {}", self.name, known.join(", ")));
        let at = self.file.at(key.span().start);
        Err(GateError {
            at,
            fault: GateFault::UnknownKey { key: word, hint },
        })
    }

    /// The tables of an array of tables, in the order of the file.
    pub fn tables(&self, key: &'static str) -> Result<Vec<Fields<'a>>, GateError> {
        let Some(value) = self.table.get(key) else {
            return Ok(Vec::new());
        };
        let expected = "an array of tables";
        let Some(array) = value.get_ref().as_array() else {
            return Err(self.wrong_type(key, expected, value));
        };
        let each = array.iter().map(|entry| match entry.get_ref().as_table() {
            Some(table) => Ok(Fields::new(
                self.file,
                format!("a {key}"),
                table,
                entry.span(),
            )),
            None => Err(self.wrong_type(key, expected, entry)),
        });
        each.collect()
    }

    pub fn table(&self, key: &'static str) -> Result<Option<Fields<'a>>, GateError> {
        let Some(value) = self.table.get(key) else {
            return Ok(None);
        };
        match value.get_ref().as_table() {
            Some(table) => {
                let name = format!("the {key} of {}", self.name);
                Ok(Some(Fields::new(self.file, name, table, value.span())))
            }
            None => Err(self.wrong_type(key, "a table", value)),
        }
    }

    /// A string that says something, on one line: reports give each a line of its own.
    pub fn string(&self, key: &'static str) -> Result<Option<String>, GateError> {
        let Some(value) = self.table.get(key) else {
            return Ok(None);
        };
        let Some(text) = value.get_ref().as_str() else {
            return Err(self.wrong_type(key, "a string", value));
        };
        let words: Vec<&str> = text.split_whitespace().collect();
        if words.is_empty() {
            let (got, expected) = ("empty".to_owned(), "words");
            return Err(self.fault_at(key, GateFault::OutOfRange { key, got, expected }));
        }
        Ok(Some(words.join(" ")))
    }

    /// A pattern or an array of them.
    pub fn patterns(&self, key: &'static str) -> Result<Option<Patterns>, GateError> {
        let Some(value) = self.table.get(key) else {
            return Ok(None);
        };
        let Some(array) = value.get_ref().as_array() else {
            return Ok(self.string(key)?.map(|one| Patterns::new(vec![one])));
        };
        let expected = "a pattern or an array of patterns, none of them empty";
        let each = array.iter().map(|entry| match entry.get_ref().as_str() {
            Some(text) if !text.is_empty() => Ok(text.to_owned()),
            _ => Err(self.wrong_type(key, expected, entry)),
        });
        let patterns: Vec<String> = each.collect::<Result<_, _>>()?;
        if patterns.is_empty() {
            return Err(self.wrong_type(key, expected, value));
        }
        Ok(Some(Patterns::new(patterns)))
    }

    /// Index of the word among `words`.
    pub fn word(&self, key: &'static str, words: &[&str]) -> Result<Option<usize>, GateError> {
        let Some(got) = self.string(key)? else {
            return Ok(None);
        };
        match words.iter().position(|word| *word == got) {
            Some(index) => Ok(Some(index)),
            None => {
                let hint = meant(&got, words)
                    .unwrap_or_else(|| format!("it is one of {}", words.join(", ")));
                Err(self.fault_at(key, GateFault::UnknownWord { key, got, hint }))
            }
        }
    }

    /// A number and how the file spells it.
    pub fn number(&self, key: &'static str) -> Result<Option<(f64, String)>, GateError> {
        let Some(value) = self.table.get(key) else {
            return Ok(None);
        };
        let literal = self.file.text[value.span()].to_owned();
        let digits = match value.get_ref() {
            DeValue::Float(float) => float.as_str(),
            DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
            _ => return Err(self.wrong_type(key, "a decimal number", value)),
        };
        match digits.parse::<f64>() {
            Ok(number) => Ok(Some((number, literal))),
            Err(_) => Err(self.wrong_type(key, "a decimal number", value)),
        }
    }

    /// A finite number above zero.
    pub fn positive(&self, key: &'static str) -> Result<Option<f64>, GateError> {
        let Some((number, got)) = self.number(key)? else {
            return Ok(None);
        };
        if number > 0.0 && number.is_finite() {
            return Ok(Some(number));
        }
        let expected = "finite and above 0";
        Err(self.fault_at(key, GateFault::OutOfRange { key, got, expected }))
    }

    /// A whole number above zero.
    pub fn count(&self, key: &'static str) -> Result<Option<u64>, GateError> {
        let Some((number, got)) = self.number(key)? else {
            return Ok(None);
        };
        if number >= 1.0 && number.fract() == 0.0 && number <= f64::from(u32::MAX) {
            return Ok(Some(number as u64));
        }
        let expected = "a whole number above 0";
        Err(self.fault_at(key, GateFault::OutOfRange { key, got, expected }))
    }

    pub fn date(&self, key: &'static str) -> Result<Option<Date>, GateError> {
        let Some(value) = self.table.get(key) else {
            return Ok(None);
        };
        let date = value
            .get_ref()
            .as_datetime()
            .and_then(|datetime| datetime.date);
        match date {
            Some(date) => Ok(Some(Date {
                year: date.year,
                month: date.month,
                day: date.day,
            })),
            None => Err(self.wrong_type(key, "a date such as 2027-01-31", value)),
        }
    }

    fn wrong_type(
        &self,
        key: &'static str,
        expected: &'static str,
        value: &Spanned<DeValue<'_>>,
    ) -> GateError {
        let got = value.get_ref().type_str().to_owned();
        let at = self.file.at(value.span().start);
        GateError {
            at,
            fault: GateFault::WrongType {
                key: key.to_owned(),
                expected,
                got,
            },
        }
    }
}

/// `did you mean` with the nearest of `known`, if one is near.
pub(super) fn meant(word: &str, known: &[&str]) -> Option<String> {
    did_you_mean(word, known).map(|near| format!("did you mean `{near}`?"))
}
