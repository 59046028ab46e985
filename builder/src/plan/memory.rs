//! Whether engines fit into the memory of a device, and what it then holds of keys and values.

use crate::sizes::Capacity;
use crate::table;
use spec_core::runtime::Footprint;
use std::fmt;

/// A device's memory and what is to go into it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    /// All of it, or what is free.
    pub(super) bytes: u64,
    /// Of all engines.
    pub(super) weight_bytes: u64,
    pub(super) footprint: Footprint,
    /// Of a token in the caches of all engines.
    pub(super) kv_token_bytes: u64,
    pub(super) max_seq_len: usize,
}

impl Fit {
    /// Bytes of all but the KV caches.
    fn taken(&self) -> u64 {
        let Footprint { working_bytes, reserve_bytes, .. } = self.footprint;
        self.weight_bytes + (working_bytes + reserve_bytes) as u64
    }

    /// Bytes that the KV caches get.
    fn kv_bytes(&self) -> u64 {
        (self.bytes.saturating_sub(self.taken()) as f64 * self.footprint.kv_fraction) as u64
    }
}

impl fmt::Display for Fit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Footprint { working_bytes, reserve_bytes, kv_fraction } = self.footprint;
        let [all, weights, working, reserve, left] = [
            self.bytes,
            self.weight_bytes,
            working_bytes as u64,
            reserve_bytes as u64,
            self.bytes.saturating_sub(self.taken()),
        ]
        .map(table::bytes);
        write!(
            f,
            "of {all} weights take {weights}, workspace {working}, {reserve} are kept back: "
        )?;
        let sequence = Capacity::bytes(self.kv_token_bytes, self.max_seq_len);
        let needed = self.taken() + sequence;
        if needed > self.bytes {
            let lacks = table::bytes(needed - self.bytes);
            return write!(
                f,
                "does not fit, {lacks} are missing for one sequence of max_seq_len {}",
                self.max_seq_len
            );
        }
        // One sequence gets what it needs, whatever the share.
        let kv_bytes = self.kv_bytes().max(sequence);
        let Capacity { tokens, sequences } =
            Capacity::new(kv_bytes, self.kv_token_bytes, self.max_seq_len);
        write!(
            f,
            "{left} are left, of which KV caches get {:.0} %: {} tokens, {sequences} sequences of max_seq_len {}",
            100.0 * kv_fraction,
            table::count(tokens),
            self.max_seq_len
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// 60 MiB of weights, 30 of workspace and 10 kept back; 1 KiB a token, 16 KiB a page.
    fn fit(mib: u64) -> Fit {
        let footprint =
            Footprint { working_bytes: 30 << 20, reserve_bytes: 10 << 20, kv_fraction: 0.5 };
        Fit {
            bytes: mib * MIB,
            weight_bytes: 60 * MIB,
            footprint,
            kv_token_bytes: 1024,
            max_seq_len: 4096,
        }
    }

    #[test]
    fn caches_get_their_share_of_what_is_left() {
        assert_eq!(
            fit(132).to_string(),
            "of 132.00 MiB weights take 60.00 MiB, workspace 30.00 MiB, 10.00 MiB are kept back: 32.00 MiB are left, of \
             which KV caches get 50 %: 16,384 tokens, 4 sequences of max_seq_len 4096"
        );
    }

    #[test]
    fn one_sequence_gets_what_it_needs() {
        assert!(fit(104).to_string().contains("4,096 tokens, 1 sequences"), "{}", fit(104));
    }

    #[test]
    fn what_is_missing_is_told() {
        let text = fit(90).to_string();
        assert!(text.contains("does not fit, 14.00 MiB are missing for one sequence"), "{text}");
    }
}
