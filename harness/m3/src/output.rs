//! Standard output, buffered, with every failed write accounted for.

use std::fmt::Display;
use std::io::{self, BufWriter, StdoutLock, Write};

use crate::exit::Failure;

/// Where results go. Progress and messages go to standard error.
pub struct Output(BufWriter<StdoutLock<'static>>);

impl Output {
    /// Standard output of the process.
    pub fn stdout() -> Self {
        Output(BufWriter::new(io::stdout().lock()))
    }

    /// One line.
    pub fn line(&mut self, text: impl Display) -> Result<(), Failure> {
        writeln!(self.0, "{text}").map_err(|error| Failure::stdout(&error))
    }

    /// Hands on what is still buffered.
    pub fn finish(mut self) -> Result<(), Failure> {
        self.0.flush().map_err(|error| Failure::stdout(&error))
    }
}
