//! One measured case as it is printed: median and spread over runs, beside its ceiling.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::clock::load1;
use crate::output::Format;

/// One case.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Suite name.
    pub suite: &'static str,
    /// Case name.
    pub case: String,
    /// One figure a run.
    pub runs: Vec<f64>,
    /// Unit of the figures.
    pub unit: &'static str,
    /// The same shape without Tidepool, one figure a run; empty when there is none.
    pub ceiling: Vec<f64>,
    /// More facts, printed beside.
    pub extra: Vec<(&'static str, Value)>,
}

/// Middle of some figures.
pub fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// Rounded to what means something: whole numbers from a thousand on, four digits of what is small.
fn digits(x: f64) -> f64 {
    let digits = |scale: f64| (x * scale).round() / scale;
    match x.abs() {
        big if big >= 1000.0 => x.round(),
        middle if middle >= 0.1 => digits(1e4),
        _ => digits(1e6),
    }
}

#[derive(Serialize)]
struct Line<'a> {
    suite: &'a str,
    case: &'a str,
    runs: usize,
    median: f64,
    min: f64,
    max: f64,
    unit: &'a str,
    ceiling: Option<f64>,
    ratio_to_ceiling: Option<f64>,
    load1: f64,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

impl Figure {
    fn line(&self) -> Line<'_> {
        let middle = median(&self.runs);
        let ceiling = (!self.ceiling.is_empty()).then(|| median(&self.ceiling));
        Line {
            suite: self.suite,
            case: &self.case,
            runs: self.runs.len(),
            median: digits(middle),
            min: digits(self.runs.iter().copied().fold(f64::INFINITY, f64::min)),
            max: digits(self.runs.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
            unit: self.unit,
            ceiling: ceiling.map(digits),
            ratio_to_ceiling: ceiling.filter(|c| *c > 0.0).map(|c| digits(middle / c)),
            load1: load1(),
            extra: self.extra.iter().map(|(name, value)| (name.to_string(), value.clone())).collect(),
        }
    }
}

/// Prints figures as they come.
pub struct Printer {
    format: Format,
    printed: u32,
}

impl Printer {
    /// To stdout.
    pub fn new(format: Format) -> Printer {
        Printer { format, printed: 0 }
    }

    /// Prints one.
    pub fn print(&mut self, figure: &Figure) {
        let line = figure.line();
        match self.format {
            Format::Json => println!("{}", json!(line)),
            Format::Table => {
                if self.printed == 0 {
                    println!(
                        "{:<34} {:>10} {:>10} {:>10} {:<8} {:>9} {:>6}",
                        "case", "median", "min", "max", "unit", "ceiling", "ratio"
                    );
                }
                let shown = |x: Option<f64>| x.map_or("-".to_owned(), |x| x.to_string());
                println!(
                    "{:<34} {:>10} {:>10} {:>10} {:<8} {:>9} {:>6}  {}",
                    line.case,
                    line.median,
                    line.min,
                    line.max,
                    line.unit,
                    shown(line.ceiling),
                    shown(line.ratio_to_ceiling),
                    line.extra.iter().map(|(k, v)| format!("{k} {v}")).collect::<Vec<_>>().join(", "),
                );
            }
        }
        self.printed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_carries_the_agreed_fields() {
        let figure = Figure {
            suite: "put-get",
            case: "x".into(),
            runs: vec![3.0, 1.0, 2.0],
            unit: "GB/s",
            ceiling: vec![4.0, 4.0],
            extra: vec![("us_per_key", json!(1.5))],
        };
        let line = json!(figure.line());
        for name in ["suite", "case", "runs", "median", "min", "max", "unit", "ceiling", "ratio_to_ceiling", "load1"] {
            assert!(line.get(name).is_some(), "{name} is missing");
        }
        assert_eq!((&line["median"], &line["min"], &line["max"]), (&json!(2.0), &json!(1.0), &json!(3.0)));
        assert_eq!((&line["runs"], &line["ratio_to_ceiling"]), (&json!(3), &json!(0.5)));
        assert_eq!(median(&[1.0, 2.0]), 1.5);
    }
}
