//! The MiniMax-M3 text model: layers, parameters, forward and backward over any backend.
