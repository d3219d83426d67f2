//! How fast busy devices are written home, all of them together: the PI controller of Linux bcache
//! (`writeback_rate`, `writeback_percent`, `writeback_rate_p_term_inverse`, ..._i_term_inverse),
//! with a floor that lets the last bytes go home too.
//!
//! State: the integral, and a balance of bytes that may still be issued. The balance grows by the
//! rate, up to one second's worth, and may go as far below zero: a pass takes whole extents, and
//! what is overdue is not stopped. Invariants: the rate is never below `FLOOR`; the integral grows
//! only while the balance is used (anti-windup: a device that lags does not raise the rate).

/// Bytes a second below which nothing is slowed down.
pub const FLOOR: u64 = 1 << 20;

/// Bytes over the target per byte a second of rate.
const P_TERM_INVERSE: i64 = 40;

/// Bytes times seconds over the target per byte a second of rate.
const I_TERM_INVERSE: i64 = 10_000;

/// How often the rate is set.
const UPDATE_MS: u64 = 1000;

/// The rate never needs to be higher, so the integral neither.
const CEILING: i64 = 1 << 40;

/// The rate and what may be issued now. Plain data of the controller.
#[derive(Debug)]
pub struct Rate {
    rate: u64,
    integral: i64,
    balance: i64,
    /// When the balance grew last, and when the rate was set last.
    grown_ms: Option<u64>,
    updated_ms: u64,
}

impl Rate {
    /// The floor, and nothing to issue yet.
    pub fn new() -> Rate {
        Rate { rate: FLOOR, integral: 0, balance: 0, grown_ms: None, updated_ms: 0 }
    }

    /// Bytes a second.
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// Bytes that may be issued now; below zero: too many were.
    pub fn balance(&self) -> i64 {
        self.balance
    }

    /// Bytes of busy devices were issued.
    pub fn spend(&mut self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(CEILING);
        self.balance = self.balance.saturating_sub(bytes).max(-(self.rate as i64));
    }

    /// Time goes on; once a second the rate follows the dirty bytes.
    pub fn advance(&mut self, now_ms: u64, dirty: u64, target: u64) {
        let Some(grown) = self.grown_ms.replace(now_ms) else {
            self.updated_ms = now_ms;
            return;
        };
        let elapsed = now_ms.saturating_sub(grown).min(UPDATE_MS);
        let earned = (self.rate * elapsed / 1000) as i64;
        self.balance = self.balance.saturating_add(earned).min(self.rate as i64);
        if now_ms.saturating_sub(self.updated_ms) >= UPDATE_MS {
            self.updated_ms = now_ms;
            self.update(dirty, target);
        }
    }

    fn update(&mut self, dirty: u64, target: u64) {
        let error = (dirty.min(CEILING as u64) as i64) - (target.min(CEILING as u64) as i64);
        let keeps_up = self.balance < self.rate as i64;
        if (error < 0 && self.integral > 0) || (error > 0 && keeps_up) {
            let most = CEILING * I_TERM_INVERSE / 4;
            self.integral = self.integral.saturating_add(error).clamp(0, most);
        }
        let rate = error / P_TERM_INVERSE + self.integral / I_TERM_INVERSE;
        self.rate = rate.clamp(FLOOR as i64, CEILING) as u64;
    }
}
