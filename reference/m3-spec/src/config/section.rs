//! Typed access to the objects of a `config.json`.

use super::ConfigError;
use serde_json::{Map, Value};
use std::fmt::Debug;

pub(super) type Result<T> = std::result::Result<T, ConfigError>;

/// A section that may be absent, and a key in it.
pub(super) type Place<'a, 'b> = (Option<&'b Section<'a>>, &'static str);

/// The value of a required key.
pub(super) fn need<'a, T>(
    s: &Section<'a>,
    key: &'static str,
    read: impl Fn(&Section<'a>, &str) -> Result<Option<T>>,
) -> Result<T> {
    read(s, key)?.ok_or_else(|| s.missing(key))
}

/// The value that all places agree on, if any has one.
pub(super) fn any<'a, T: PartialEq + Debug>(
    places: &[Place<'a, '_>],
    read: impl Fn(&Section<'a>, &str) -> Result<Option<T>>,
) -> Result<Option<T>> {
    let mut found = Vec::new();
    for (section, key) in places {
        if let Some(section) = section {
            found.push((section.path(key), read(section, key)?));
        }
    }
    Ok(agree(found)?.map(|(_, value)| value))
}

pub(super) fn need_any<'a, T: PartialEq + Debug>(
    places: &[Place<'a, '_>],
    read: impl Fn(&Section<'a>, &str) -> Result<Option<T>>,
) -> Result<T> {
    any(places, read)?.ok_or_else(|| {
        let keys: Vec<String> = places
            .iter()
            .filter_map(|(s, key)| s.map(|s| s.path(key)))
            .collect();
        ConfigError::Missing {
            key: keys.join(" or "),
            hint: "it has no default",
        }
    })
}

/// The first present value with its key, once all present values are equal.
pub(super) fn agree<T: PartialEq + Debug>(
    values: impl IntoIterator<Item = (String, Option<T>)>,
) -> Result<Option<(String, T)>> {
    let mut present = values
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)));
    let Some((first, value)) = present.next() else {
        return Ok(None);
    };
    match present.find(|(_, other)| *other != value) {
        None => Ok(Some((first, value))),
        Some((second, other)) => Err(ConfigError::Disagree {
            first,
            first_value: format!("{value:?}"),
            second,
            second_value: format!("{other:?}"),
        }),
    }
}

/// Refuses any value but one; absent is fine.
pub(super) fn only<'a, T: PartialEq + Debug>(
    s: &Section<'a>,
    key: &str,
    read: impl Fn(&Section<'a>, &str) -> Result<Option<T>>,
    supported: T,
) -> Result<()> {
    match read(s, key)? {
        Some(got) if got != supported => Err(ConfigError::Unsupported {
            key: s.path(key),
            got: format!("{got:?}"),
            supported: format!("{supported:?}"),
        }),
        _ => Ok(()),
    }
}

/// A JSON object and where it stands in the file. Null counts as absent.
pub(super) struct Section<'a> {
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Section<'a> {
    pub(super) fn root(value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Section {
                prefix: String::new(),
                map,
            }),
            other => Err(wrong_type("config.json".into(), "an object", other)),
        }
    }

    pub(super) fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    pub(super) fn missing(&self, key: &'static str) -> ConfigError {
        ConfigError::Missing {
            key: self.path(key),
            hint: "it has no default",
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Reads a key with `convert`, which gives `None` for a value of another type.
    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match convert(value) {
                Some(converted) => Ok(Some(converted)),
                None => Err(wrong_type(self.path(key), expected, value)),
            },
        }
    }

    pub(super) fn section(&self, key: &str) -> Result<Option<Section<'a>>> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Section {
            prefix: format!("{}.", self.path(key)),
            map,
        }))
    }

    pub(super) fn uint(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a non-negative integer", |v| {
            usize::try_from(v.as_u64()?).ok()
        })
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(super) fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A token id; of a list, the first.
    pub(super) fn token(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a token id or a list of them", |v| {
            let id = v.as_array().map_or(Some(v), |list| list.first())?;
            usize::try_from(id.as_u64()?).ok()
        })
    }

    /// A list of 0 and 1.
    pub(super) fn flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.typed(key, "a list of 0 and 1", |v| {
            v.as_array()?
                .iter()
                .map(|flag| match (flag.as_u64(), flag.as_bool()) {
                    (Some(0), _) | (_, Some(false)) => Some(false),
                    (Some(1), _) | (_, Some(true)) => Some(true),
                    _ => None,
                })
                .collect()
        })
    }

    /// A list of two names, as flags.
    pub(super) fn kinds(
        &self,
        key: &str,
        names: &'static [(&str, bool); 2],
    ) -> Result<Option<Vec<bool>>> {
        let Some(list) = self.typed(key, "a list of strings", Value::as_array)? else {
            return Ok(None);
        };
        let flag = |entry: &Value| {
            let name = entry.as_str();
            let kind = names.iter().find(|(known, _)| Some(*known) == name);
            kind.map(|&(_, flag)| flag)
                .ok_or_else(|| ConfigError::Unsupported {
                    key: self.path(key),
                    got: entry.to_string(),
                    supported: format!("{:?} or {:?}", names[0].0, names[1].0),
                })
        };
        list.iter().map(flag).collect::<Result<_>>().map(Some)
    }
}

/// Longest value that an error message repeats.
const SHOWN_CHARS: usize = 60;

fn wrong_type(key: String, expected: &'static str, got: &Value) -> ConfigError {
    let mut shown = got.to_string();
    if shown.chars().count() > SHOWN_CHARS {
        shown = shown.chars().take(SHOWN_CHARS).chain("…".chars()).collect();
    }
    ConfigError::WrongType {
        key,
        expected,
        got: shown,
    }
}
