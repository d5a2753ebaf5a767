//! Both pipelines: from a case to a verdict ([`gate_pipeline`]), and from a recipe to a trained model.

pub mod cases;
mod error;
mod files;
pub mod gate_pipeline;
pub mod gates;
pub mod lab;
pub mod logprobs;
pub mod rooms;
pub mod train;
pub mod train_pipeline;

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
