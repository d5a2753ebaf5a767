//! How a run ends: one code, and at most one line.

use std::fmt::{self, Display};
use std::io::{self, Write};
use std::process::ExitCode;

/// Exit codes. 0, 4, 100, 101 and 110 mean what they mean for nextest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// All went well.
    Pass = 0,
    /// Anything that has no code of its own.
    Unexpected = 1,
    /// Wrong arguments or bad input.
    Usage = 2,
    /// A filter matched nothing.
    NothingSelected = 4,
    /// A gate failed.
    GateFailed = 100,
    /// A kernel did not compile.
    KernelBuild = 101,
    /// An output could not be written.
    Write = 110,
    /// A golden is missing or stale.
    Golden = 120,
    /// The device that was asked for is absent.
    NoDevice = 121,
}

impl Code {
    /// Every code, with its line of `--help`.
    pub const ALL: [(Code, &'static str); 9] = [
        (Code::Pass, "pass"),
        (Code::Unexpected, "anything else"),
        (Code::Usage, "usage or bad input"),
        (Code::NothingSelected, "nothing selected"),
        (Code::GateFailed, "a gate failed"),
        (Code::KernelBuild, "kernel build failed"),
        (Code::Write, "write error"),
        (Code::Golden, "golden missing or stale"),
        (Code::NoDevice, "required device absent"),
    ];
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> ExitCode {
        ExitCode::from(code as u8)
    }
}

/// The table of codes for `--help`.
pub fn table() -> String {
    let lines = Code::ALL.map(|(code, meaning)| format!("  {:>3}  {meaning}", code as u8));
    format!("Exit codes:\n{}", lines.join("\n"))
}

/// Why a run ended early: what is wrong (file, tensor, value) and what to do, on one line.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// What the process ends with.
    pub code: Code,
    /// Lower case, without a full stop; empty when there is nothing to say.
    pub message: String,
}

impl Failure {
    /// A failure that ends the process with `code`.
    pub fn new(code: Code, message: impl Display) -> Self {
        Failure {
            code,
            message: message.to_string(),
        }
    }

    /// Bad arguments or bad input.
    pub fn usage(message: impl Display) -> Self {
        Failure::new(Code::Usage, message)
    }

    /// A failed write to standard output. A reader that left, as `head` does, has what it wanted.
    pub fn stdout(error: &io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Failure::new(Code::Pass, "");
        }
        Failure::new(Code::Write, format!("standard output: {error}"))
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&one_line(&self.message))
    }
}

impl From<m3_kernels::Error> for Failure {
    fn from(error: m3_kernels::Error) -> Self {
        let code = match &error {
            m3_kernels::Error::NoDevice { .. }
            | m3_kernels::Error::Library { .. }
            | m3_kernels::Error::UnsupportedArch { .. } => Code::NoDevice,
            m3_kernels::Error::Compile { .. } => Code::KernelBuild,
            m3_kernels::Error::Index { .. } => Code::Usage,
            _ => Code::Unexpected,
        };
        Failure::new(code, error)
    }
}

impl From<m3_checkpoint::Error> for Failure {
    fn from(error: m3_checkpoint::Error) -> Self {
        use m3_checkpoint::Error;
        let code = match &error {
            Error::DiskFull { .. } | Error::Write { .. } => Code::Write,
            Error::NoSuchTensor { .. } | Error::BufferLength { .. } | Error::Plan { .. } => {
                Code::Unexpected
            }
            _ => Code::Usage,
        };
        Failure::new(code, error)
    }
}

impl From<m3_model::Error> for Failure {
    fn from(error: m3_model::Error) -> Self {
        match error {
            m3_model::Error::Input(message) => Failure::usage(message),
            m3_model::Error::Checkpoint(error) => error.into(),
            m3_model::Error::Kernel(error) => error.into(),
        }
    }
}

impl From<m3_trainer::Error> for Failure {
    fn from(error: m3_trainer::Error) -> Self {
        match error {
            m3_trainer::Error::Input(message) => Failure::usage(message),
            m3_trainer::Error::Model(error) => error.into(),
            m3_trainer::Error::Kernel(error) => error.into(),
        }
    }
}

impl From<m3_rollout::Error> for Failure {
    fn from(error: m3_rollout::Error) -> Self {
        match error {
            m3_rollout::Error::Input(message) => Failure::usage(message),
            m3_rollout::Error::Model(error) => error.into(),
            m3_rollout::Error::Kernel(error) => error.into(),
            error @ m3_rollout::Error::Sync(_) => Failure::new(Code::Unexpected, error),
        }
    }
}

impl From<m3_harness::Error> for Failure {
    fn from(error: m3_harness::Error) -> Self {
        match error {
            m3_harness::Error::Input(message) => Failure::usage(message),
            m3_harness::Error::Model(error) => error.into(),
            m3_harness::Error::Trainer(error) => error.into(),
            m3_harness::Error::Rollout(error) => error.into(),
            m3_harness::Error::Kernel(error) => error.into(),
            error @ m3_harness::Error::Write { .. } => Failure::new(Code::Write, error),
            error @ m3_harness::Error::NonFinite(_) => Failure::new(Code::Unexpected, error),
        }
    }
}

impl From<m3_gate::GateError> for Failure {
    fn from(error: m3_gate::GateError) -> Self {
        Failure::usage(error)
    }
}

/// Prints what went wrong, if anything did, and gives the code.
pub fn report(result: Result<Code, Failure>) -> Code {
    match result {
        Ok(code) => code,
        Err(failure) => {
            if !failure.message.is_empty() {
                // Without a standard error there is nobody left to tell.
                let _ = writeln!(io::stderr(), "error: {failure}");
            }
            failure.code
        }
    }
}

/// A panic is a bug of ours: one line, unless `RUST_BACKTRACE` asks for more.
pub fn report_panics_in_one_line() {
    if std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0") {
        return;
    }
    std::panic::set_hook(Box::new(|panic| {
        let place = panic
            .location()
            .map_or(String::new(), |at| format!(" at {at}"));
        let what = said(panic.payload());
        let _ = writeln!(
            io::stderr(),
            "error: internal fault{place}: {}; this is a bug, RUST_BACKTRACE=1 shows where it came from",
            one_line(what)
        );
    }));
}

fn said(payload: &dyn std::any::Any) -> &str {
    let owned = payload.downcast_ref::<String>().map(String::as_str);
    owned
        .or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

/// Control characters, line breaks among them, become visible escapes: a name from a file cannot forge a second line.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_lists_every_code_once_ascending() {
        let codes = Code::ALL.map(|(code, _)| code as u8);
        assert!(codes.is_sorted_by(|a, b| a < b));
        assert!(table().contains("  121  required device absent"));
    }

    #[test]
    fn a_message_stays_on_one_line_whatever_it_quotes() {
        let failure = Failure::usage("tensor \"a\nb\u{1b}[31m\" is unexpected");
        assert_eq!(
            failure.to_string(),
            "tensor \"a\\nb\\u{1b}[31m\" is unexpected"
        );
    }

    #[test]
    fn a_reader_that_left_is_a_pass_and_a_full_disk_a_write_error() {
        let gone = Failure::stdout(&io::ErrorKind::BrokenPipe.into());
        assert_eq!(gone, Failure::new(Code::Pass, ""));
        let full = Failure::stdout(&io::ErrorKind::StorageFull.into());
        assert_eq!(full.code, Code::Write);
        assert!(full.message.starts_with("standard output: "));
    }

    #[test]
    fn an_absent_device_has_a_code_of_its_own() {
        let reason = "none".to_owned();
        let failure = Failure::from(m3_kernels::Error::NoDevice { reason });
        assert_eq!(failure.code, Code::NoDevice);
        let (device, bytes) = ("cpu".to_owned(), 8);
        let failure = Failure::from(m3_kernels::Error::OutOfMemory { device, bytes });
        assert_eq!(failure.code, Code::Unexpected);
    }

    #[test]
    fn a_code_survives_every_layer_that_hands_the_error_on() {
        let path = std::path::PathBuf::from("w");
        let (full, gone) = (io::ErrorKind::StorageFull, io::ErrorKind::NotFound);
        let write = m3_checkpoint::Error::Write {
            path: path.clone(),
            source: full.into(),
        };
        let read = m3_checkpoint::Error::Read {
            path,
            source: gone.into(),
        };
        let harness = |error: m3_checkpoint::Error| m3_harness::Error::from(error);
        assert_eq!(Failure::from(harness(write)).code, Code::Write);
        assert_eq!(Failure::from(harness(read)).code, Code::Usage);
        let input = m3_model::Error::Input("token 9 is not below 8".into());
        let failure = Failure::from(m3_harness::Error::from(input));
        assert_eq!(failure, Failure::usage("token 9 is not below 8"));
    }
}
