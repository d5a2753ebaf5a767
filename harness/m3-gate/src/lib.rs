//! Records, metrics, gates and verdicts: pure functions from tensors to PASS, FAIL or ERROR.
