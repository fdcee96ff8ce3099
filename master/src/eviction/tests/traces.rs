//! Traces made up for tests: kinds of traffic that no constant of a policy was tuned to.

/// Seeded random numbers: splitmix64.
pub struct Draw(pub u64);

impl Draw {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        super::super::spread(self.0)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn chance(&mut self, of: f64) -> bool {
        self.unit() < of
    }

    fn exponential(&mut self, mean: f64) -> u64 {
        (-mean * (1.0 - self.unit()).ln()) as u64
    }

    /// Below `bound`, with a density that falls as the power `-skew`, which must not be 1.
    fn zipf(&mut self, bound: u64, skew: f64) -> u64 {
        let reach = (bound as f64).powf(1.0 - skew) - 1.0;
        ((self.unit() * reach + 1.0).powf(1.0 / (1.0 - skew)) - 1.0) as u64 % bound
    }
}

/// Requests, each the blocks of a prompt.
pub type Trace = Vec<Vec<u64>>;

fn prompt(id: u64, blocks: u64) -> Vec<u64> {
    (1..=blocks).map(|depth| (id + 1) << 20 | depth).collect()
}

/// Ids of blocks that are in no `prompt`.
struct Fresh(u64);

impl Fresh {
    fn blocks(&mut self, number: u64) -> impl Iterator<Item = u64> {
        self.0 += number;
        (self.0 - number..self.0).map(|id| id | 1 << 50)
    }
}

/// A loop over more than fits.
pub fn scan(requests: u64) -> Trace {
    (0..requests).map(|i| prompt(i % 150, 20)).collect()
}

/// The same among popular prompts.
pub fn scan_among_popular(seed: u64, requests: u64) -> Trace {
    let mut draw = Draw(seed);
    let mut one = |i| if draw.chance(0.5) { prompt(i % 500, 10) } else { prompt(1000 + draw.zipf(200, 0.8), 10) };
    (0..requests).map(&mut one).collect()
}

/// Single-shot prompts, some more popular than others.
pub fn popular(seed: u64, requests: u64, skew: f64) -> Trace {
    let mut draw = Draw(seed);
    (0..requests).map(|_| draw.zipf(2000, skew)).map(|id| prompt(id, 1 + id * 7 % 20)).collect()
}

/// Every prompt as likely as any other.
pub fn uniform(seed: u64, requests: u64) -> Trace {
    let mut draw = Draw(seed);
    (0..requests).map(|_| prompt(draw.below(2000), 2)).collect()
}

/// The closer to the top of the stack of prompts, the more likely: what LRU is best at.
pub fn recency(seed: u64, requests: u64, mean: f64, new: f64) -> Trace {
    let mut draw = Draw(seed);
    let (mut stack, mut ids): (Vec<u64>, u64) = (Vec::new(), 0);
    let mut one = || {
        let depth = draw.exponential(mean) as usize;
        let id = if depth >= stack.len() || draw.chance(new) {
            ids += 1;
            ids
        } else {
            stack.remove(stack.len() - 1 - depth)
        };
        stack.push(id);
        prompt(id, 5 + id % 10)
    };
    (0..requests).map(|_| one()).collect()
}

/// Agents: a few long shared prefixes, sessions that grow by turns, so many at once: a cliff at their working set.
pub fn agents(seed: u64, requests: u64, at_once: usize) -> Trace {
    let mut draw = Draw(seed);
    let mut fresh = Fresh(0);
    let mut sessions: Vec<(Vec<u64>, u64)> = Vec::new();
    let mut trace = Trace::new();
    for _ in 0..requests {
        while sessions.len() < at_once {
            let mut blocks = prompt(draw.below(4), 20);
            blocks.extend(fresh.blocks(3));
            sessions.push((blocks, 1 + draw.below(16)));
        }
        let turn = draw.below(at_once as u64) as usize;
        let (blocks, left) = &mut sessions[turn];
        // The last block is not full yet and does not come back.
        trace.push(blocks.iter().copied().chain(fresh.blocks(1)).collect());
        blocks.extend(fresh.blocks(1 + draw.below(4)));
        *left -= 1;
        if *left == 0 {
            sessions.swap_remove(turn);
        }
    }
    trace
}

/// Chats: most prompts are asked once, some go on after a while.
pub fn chats(seed: u64, requests: u64, goes_on: f64) -> Trace {
    let mut draw = Draw(seed);
    let mut fresh = Fresh(0);
    let mut waiting: std::collections::BTreeMap<(u64, u64), Vec<u64>> = Default::default();
    let mut trace = Trace::new();
    for now in 0..requests {
        let blocks = match waiting.first_entry() {
            Some(first) if first.key().0 <= now => first.remove(),
            _ => [7].into_iter().chain(fresh.blocks(2 + draw.exponential(8.0))).collect(),
        };
        trace.push(blocks.iter().copied().chain(fresh.blocks(1)).collect());
        if draw.chance(goes_on) {
            let next = blocks.into_iter().chain(fresh.blocks(1 + draw.below(3))).collect();
            waiting.insert((now + 1 + draw.exponential(100.0), now), next);
        }
    }
    trace
}

/// Tools: popular long prefixes, each time with another end.
pub fn tools(seed: u64, requests: u64) -> Trace {
    let mut draw = Draw(seed);
    let mut fresh = Fresh(0);
    let mut one = || {
        let id = draw.zipf(200, 1.1);
        prompt(id, 4 + id % 15).into_iter().chain(fresh.blocks(1 + draw.below(4))).collect()
    };
    (0..requests).map(|_| one()).collect()
}

/// Every prompt exactly twice, so many requests apart.
pub fn twice(requests: u64, apart: u64) -> Trace {
    (0..requests).map(|i| prompt(i / (2 * apart) * apart + i % apart, 10)).collect()
}

/// One kind after the other, with nothing in common.
pub fn phases(seed: u64, requests: u64) -> Trace {
    let each = requests / 6;
    let parts = [
        recency(seed, each, 40.0, 0.2),
        twice(each, 100),
        chats(seed, each, 0.5),
        recency(seed + 1, each, 80.0, 0.05),
        scan_among_popular(seed, each),
        agents(seed, each, 30),
    ];
    let apart = |(part, trace): (u64, Trace)| {
        trace.into_iter().map(move |keys| keys.into_iter().map(|key| key ^ (part << 56)).collect())
    };
    (0..).zip(parts).flat_map(apart).collect()
}

/// Single blocks, every one as likely as any other.
pub fn singles(seed: u64, requests: u64, of: u64) -> Trace {
    let mut draw = Draw(seed);
    (0..requests).map(|_| vec![1 + draw.below(of)]).collect()
}

/// Single blocks, some more popular than others.
pub fn zipf_singles(seed: u64, requests: u64, skew: f64) -> Trace {
    let mut draw = Draw(seed);
    (0..requests).map(|_| vec![1 + draw.zipf(20_000, skew)]).collect()
}

/// Popular prompts, and what is popular moves on.
pub fn drift(seed: u64, requests: u64) -> Trace {
    let mut draw = Draw(seed);
    let mut one = |now: u64| {
        let id = now / 4 + draw.zipf(300, 0.8);
        prompt(id, 3 + id * 5 % 12)
    };
    (0..requests).map(&mut one).collect()
}

/// Trees of thought: a prompt that many branches share, each of which is gone through a few times, then another.
pub fn branches(seed: u64, requests: u64) -> Trace {
    let mut draw = Draw(seed);
    let mut one = |now: u64| {
        let (root, branch) = (now / 50 - draw.below(3).min(now / 50), draw.below(12));
        let tail = 1 + draw.below(6);
        let ends = (1..=tail).map(|depth| (root << 8 | branch) << 8 | depth | 1 << 55);
        prompt(root, 15).into_iter().chain(ends).collect()
    };
    (0..requests).map(&mut one).collect()
}

/// Loops of several lengths at once, at several speeds.
pub fn loops(seed: u64, requests: u64) -> Trace {
    let mut draw = Draw(seed);
    let mut at = [0u64; 4];
    let mut one = |_| {
        let which = draw.below(4) as usize;
        at[which] += 1;
        prompt(((which as u64) << 12) | (at[which] % [20, 100, 400, 1500][which]), 6)
    };
    (0..requests).map(&mut one).collect()
}

/// Several kinds at once.
pub fn mixed(seed: u64, requests: u64) -> Trace {
    let each = requests / 3;
    let parts = [recency(seed, each, 60.0, 0.1), chats(seed, each, 0.5), zipf_singles(seed, each, 0.7)];
    let mut parts = parts.map(|part| part.into_iter());
    let mut draw = Draw(seed ^ 99);
    let mut trace = Trace::new();
    while parts.iter().any(|part| part.len() > 0) {
        let which = draw.below(3) as usize;
        let apart = |keys: Vec<u64>| keys.into_iter().map(|key| key ^ ((1 + which as u64) << 57)).collect();
        trace.extend(parts[which].next().map(apart));
    }
    trace
}
