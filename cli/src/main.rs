//! The tidepool binary.

fn main() {}
