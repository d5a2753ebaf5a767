//! Both pipelines: from a case to a verdict ([`gate_pipeline`]), and from a recipe to a trained model.

pub mod cases;
mod error;
mod files;
pub mod gate_pipeline;
pub mod gates;
pub mod generate;
pub mod goldens;
pub mod lab;
pub mod logprobs;
#[cfg(debug_assertions)]
pub mod mutants;
pub mod rooms;
pub mod train;
pub mod train_pipeline;
pub mod whole_model;

pub use error::{Error, Result};

use m3_gate::Date;

/// Today, UTC: what expiry dates of gates and waivers are held against.
pub fn today() -> Date {
    let date = jiff::Timestamp::now()
        .to_zoned(jiff::tz::TimeZone::UTC)
        .date();
    Date {
        year: date.year() as u16,
        month: date.month() as u8,
        day: date.day() as u8,
    }
}

/// Now, UTC, to the second, as in `2026-12-01T01:40:07Z`.
pub fn now_utc() -> String {
    jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string()
}

/// Now, UTC, for a directory's name: `20261201-014007`.
pub fn stamp_utc() -> String {
    jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string()
}
