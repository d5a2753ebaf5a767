//! The rules of the repository that no compiler checks. Each is a test, so that a rule and its enforcement cannot drift
//! apart; a message says what to do.

mod crossings;
mod docs;
mod repository;
mod rooms;
mod source;
