//! The registry of planted faults, and that one that does no harm is said to survive.
#![cfg(debug_assertions)]

use std::collections::BTreeSet;

use m3_gate::Patterns;
use m3_harness::{cases, gates, mutants, today};
use m3_kernels::cpu::CpuBackend;

#[test]
fn every_fault_has_words_of_its_own_and_cases_that_exist() {
    let faults = mutants::registry();
    let components = mutants::components::registry();
    let words = faults.iter().map(|fault| fault.words);
    let words: Vec<&str> = words
        .chain(components.iter().map(|fault| fault.words))
        .collect();
    assert_eq!(words.iter().collect::<BTreeSet<_>>().len(), words.len());
    assert!(faults.len() >= 60);
    let cases: Vec<String> = cases::all::<CpuBackend>()
        .into_iter()
        .map(|case| case.name)
        .collect();
    for fault in &faults {
        for pattern in fault.cases {
            let patterns = Patterns::new(vec![(*pattern).to_owned()]);
            assert!(
                cases.iter().any(|case| patterns.matches(case)),
                "{}: {pattern}",
                fault.words
            );
        }
    }
}

#[test]
fn a_fault_is_caught_by_name_and_one_that_changes_nothing_survives() {
    let (backend, gates) = (CpuBackend::default(), gates::all(today()).unwrap());
    let fault = |words: &str| {
        let named = |fault: &mutants::Fault| fault.words == words;
        mutants::registry().into_iter().find(named).unwrap()
    };
    let twice = mutants::run(&backend, &gates, &fault("norm: +1 twice"), 1);
    assert!(twice.catchers().contains("rms_norm.forward.norm_rel"));
    assert!(twice.line().starts_with("caught"));
    // The temperature of this case is 1.
    let mut missing = fault("log-prob: temperature missing in the score");
    missing.cases = &["log_prob::f32/t70_*"];
    let survived = mutants::run(&backend, &gates, &missing, 1);
    assert_eq!(survived.survived(), ["log_prob::f32/t70_v1200_h96"]);
    let report = mutants::Report {
        faults: vec![survived],
        scaled: None,
    };
    assert!(!report.is_green(&gates));
    assert!(
        report
            .summary(&gates)
            .ends_with("1 planted faults: 0 caught, 1 survived\n")
    );
}
