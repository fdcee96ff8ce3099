//! Whether to go by what was learned, or as LRU does.

use super::model::UPDATE_TICKS;

/// What an update leaves of the sums over actual hits: they reach back four capacities.
const ACTUAL_KEPT: f64 = 0.97;
/// What it leaves of the sums over guesses.
const GUESS_KEPT: f64 = 0.99;
/// Requests an update must span to count in full: small caches turn over in too few requests to judge by.
const REQUESTS_FULL: u32 = 32;
/// How sure a guess must be, in standard deviations of the difference, before LRU is left.
const SURE_TO_LEARN: f64 = 2.0;
/// By what share of LRU's hits it must be better.
const GAIN_MIN: f64 = 0.01;
/// How sure a loss must be before what was learned is left.
const SURE_TO_LEAVE: f64 = 2.0;
/// The share of LRU's hits that may be lost without a verdict.
const LOSS_MAX: f64 = 0.005;
/// Updates before the first try; 16 ticks each.
const HOLD_FIRST: u32 = 8;
/// Updates before another try; doubles with each that failed.
const HOLD_MIN: u32 = 32;
const HOLD_MAX: u32 = 1024;

const _: () = assert!(UPDATE_TICKS == 16, "the figures above are per update");

/// In which order blocks go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    /// Least worth first.
    Learned,
    /// Longest unused first.
    Lru,
}

/// Blocks at the front of requests that two caches had, and how far the two differ.
#[derive(Clone, Copy, Default, Debug)]
struct Sums {
    learned: f64,
    lru: f64,
    squares: f64,
}

impl Sums {
    fn add(&mut self, learned: u32, lru: u32) {
        self.learned += f64::from(learned);
        self.lru += f64::from(lru);
        self.squares += (f64::from(learned) - f64::from(lru)).powi(2);
    }

    fn fade(&mut self, kept: f64) {
        (self.learned, self.lru, self.squares) = (self.learned * kept, self.lru * kept, self.squares * kept);
    }

    /// The difference as a share of LRU's hits, and in standard deviations.
    fn gain(&self) -> (f64, f64) {
        let difference = self.learned - self.lru;
        (difference / self.lru.max(1.0), difference / self.squares.max(1.0).sqrt())
    }
}

/// The front of one request, in blocks: what it found here and under LRU, and the guess for a cache that goes by what
/// was learned, with LRU's beside it, over the sampled blocks.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Fronts {
    pub actual: u32,
    pub lru: u32,
    pub guess: u32,
    pub guess_lru: u32,
}

/// Compares, and decides.
pub(super) struct Judge {
    order: Order,
    actual: Sums,
    guess: Sums,
    requests: u32,
    hold: u32,
    next_hold: u32,
}

impl Judge {
    pub(super) fn new() -> Judge {
        Judge {
            order: Order::Lru,
            actual: Sums::default(),
            guess: Sums::default(),
            requests: 0,
            hold: HOLD_FIRST,
            next_hold: HOLD_MIN,
        }
    }

    pub(super) fn order(&self) -> Order {
        self.order
    }

    pub(super) fn request(&mut self, fronts: Fronts) {
        self.requests += 1;
        self.actual.add(fronts.actual, fronts.lru);
        self.guess.add(fronts.guess, fronts.guess_lru);
    }

    /// Once per update of the model.
    pub(super) fn update(&mut self) {
        self.hold = self.hold.saturating_sub(1);
        match self.order {
            Order::Learned => {
                let (share, sure) = self.actual.gain();
                if share > GAIN_MIN && sure > SURE_TO_LEARN {
                    self.next_hold = HOLD_MIN;
                }
                if share < -LOSS_MAX && sure < -SURE_TO_LEAVE {
                    self.order = Order::Lru;
                    self.hold = self.next_hold;
                    self.next_hold = (self.next_hold * 2).min(HOLD_MAX);
                    self.actual = Sums::default();
                }
            }
            Order::Lru => {
                let (share, sure) = self.guess.gain();
                if self.hold == 0 && share > GAIN_MIN && sure > SURE_TO_LEARN {
                    self.order = Order::Learned;
                    self.actual = Sums::default();
                }
            }
        }
        let weight = f64::from(self.requests.min(REQUESTS_FULL)) / f64::from(REQUESTS_FULL);
        self.actual.fade(1.0 - (1.0 - ACTUAL_KEPT) * weight);
        self.guess.fade(1.0 - (1.0 - GUESS_KEPT) * weight);
        self.requests = 0;
    }
}
