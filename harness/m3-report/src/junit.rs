//! JUnit XML: a suite per op, a test per case.

use crate::GateRun;
use m3_gate::record::CaseRecord;
use m3_gate::{Verdict, failure_block, failure_line};
use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};
use std::time::Duration;

/// The report as JUnit XML. FAIL is a failure, ERROR an error, a case without its device skipped;
/// the message is the failure in one line, the text its block. Shadow gates fail nothing.
///
/// # Errors
/// The XML writer's error.
pub fn junit(report: &GateRun) -> Result<String, quick_junit::SerializeError> {
    let mut suites: Vec<TestSuite> = Vec::new();
    for case in &report.cases {
        let test = test_case(case);
        if let Some(suite) = suites
            .iter_mut()
            .find(|suite| suite.name.as_str() == case.op())
        {
            suite.add_test_case(test);
        } else {
            let mut suite = TestSuite::new(case.op());
            suite.add_test_case(test);
            suites.push(suite);
        }
    }
    let mut xml = Report::new("m3 gate");
    xml.add_test_suites(suites);
    xml.to_string()
}

fn test_case(case: &CaseRecord) -> TestCase {
    let mut status = match case.verdict() {
        Verdict::Pass | Verdict::Waived => TestCaseStatus::success(),
        Verdict::Inactive if case.skipped.is_some() => TestCaseStatus::skipped(),
        Verdict::Fail => TestCaseStatus::non_success(NonSuccessKind::Failure),
        Verdict::Error | Verdict::Inactive => TestCaseStatus::non_success(NonSuccessKind::Error),
    };
    if let Some(why) = &case.skipped {
        status.set_message(why.as_str());
    } else if !case.verdict().is_green() {
        let unjudged = || "no block gate judged the case".to_owned();
        status.set_message(failure_line(case).unwrap_or_else(unjudged));
        status.set_description(failure_block(case).unwrap_or_else(unjudged));
    }
    let mut test = TestCase::new(case.case.as_str(), status);
    test.set_classname(case.op())
        .set_time(Duration::from_millis(case.duration_ms));
    test
}
