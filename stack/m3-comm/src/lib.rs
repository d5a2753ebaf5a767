//! Communicators between ranks: solo today.
