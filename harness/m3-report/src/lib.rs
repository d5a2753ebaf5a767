//! Reports from records: terminal, JSON, JUnit and HTML.
