//! JSON lines: one typed object a line, the schema version first.

use crate::{GateRun, Summary};
use m3_gate::record::{CaseRecord, Run, SCHEMA_VERSION};
use serde::{Deserialize, Serialize};

#[derive(Serialize)]
#[serde(tag = "type", content = "data", rename_all = "lowercase")]
enum Line<'a> {
    Run { schema_version: u32, run: &'a Run },
    Case(&'a CaseRecord),
    Summary(Summary),
}

#[derive(Deserialize)]
#[serde(tag = "type", content = "data", rename_all = "lowercase")]
enum OwnedLine {
    Run { schema_version: u32, run: Run },
    Case(Box<CaseRecord>),
    Summary {},
}

/// Why a file of records cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A line is not what it says.
    #[error("line {line} is not a record: {error}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What the JSON reader says.
        error: serde_json::Error,
    },
    /// Another version of the records.
    #[error(
        "records of schema {got}, expected {expected}; read them with the commit that wrote them"
    )]
    Schema {
        /// What this build reads.
        expected: u32,
        /// What the file says.
        got: u32,
    },
    /// No run line at the head.
    #[error("the first line is no run: not a file of records, or its head was cut off")]
    NoRun,
    /// No summary at the end.
    #[error("no summary at the end: the run was cut off after {cases} cases")]
    CutOff {
        /// Cases read.
        cases: usize,
    },
}

/// The run, its cases in order, and the summary: the summary's presence says that the run ended.
pub fn json_lines(report: &GateRun) -> String {
    let head = Line::Run {
        schema_version: SCHEMA_VERSION,
        run: &report.run,
    };
    let cases = report.cases.iter().map(Line::Case);
    let lines = std::iter::once(head)
        .chain(cases)
        .chain([Line::Summary(report.summary())]);
    lines
        .map(|line| serde_json::to_string(&line).expect("records always serialise") + "\n")
        .collect()
}

/// Reads what [`json_lines`] wrote.
///
/// # Errors
/// [`ReadError`]: a line that is no record, another schema, or a file without head or end.
pub fn read_json_lines(text: &str) -> Result<GateRun, ReadError> {
    let mut lines = text.lines().enumerate().map(|(i, text)| {
        serde_json::from_str(text).map_err(|error| ReadError::Line { line: i + 1, error })
    });
    let Some(OwnedLine::Run {
        schema_version,
        run,
    }) = lines.next().transpose()?
    else {
        return Err(ReadError::NoRun);
    };
    if schema_version != SCHEMA_VERSION {
        return Err(ReadError::Schema {
            expected: SCHEMA_VERSION,
            got: schema_version,
        });
    }
    let mut cases = Vec::new();
    for line in lines {
        match line? {
            OwnedLine::Case(case) => cases.push(*case),
            OwnedLine::Summary {} => return Ok(GateRun { run, cases }),
            OwnedLine::Run { .. } => return Err(ReadError::CutOff { cases: cases.len() }),
        }
    }
    Err(ReadError::CutOff { cases: cases.len() })
}
