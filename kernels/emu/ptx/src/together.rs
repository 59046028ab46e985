//! What threads do together: it happens when all whom the instruction names have come to it.

use std::ops::Range;

use half::f16;

use crate::cluster::{Cluster, State};
use crate::operation::{LANES, Operation, Place, Shuffle, Slot, Source, Space, Together};

/// All lanes.
const ALL: u32 = u32::MAX;

impl Cluster<'_> {
    /// Does what lanes of a warp have met for; whether there was anything.
    pub(crate) fn meet(&mut self, lanes: Range<usize>) -> Result<bool, String> {
        let meets = |cluster: &Self, thread: usize| cluster.threads[thread].state == State::Meeting;
        let waiting: Vec<usize> = lanes.clone().filter(|&thread| meets(self, thread)).collect();
        for &leader in &waiting {
            let kernel = self.kernel;
            let at = self.threads[leader].next;
            let Operation::Together(together) = &kernel.code[at].operation else { continue };
            let mask = self.mask(leader, together);
            let missing = |lane: usize| {
                let thread = &self.threads[lanes.start + lane];
                mask >> lane & 1 != 0 && (thread.state != State::Meeting || thread.next != at)
            };
            if (0..LANES).any(missing) {
                continue;
            }
            let lane = leader - lanes.start;
            let place = self.place_of(leader);
            if mask >> lane & 1 == 0 {
                return Err(format!("{place}: lane {lane} is not in its mask {mask:#x}"));
            }
            let mut named = (0..LANES).filter(|lane| mask >> lane & 1 != 0);
            if named.any(|lane| self.mask(lanes.start + lane, together) != mask) {
                return Err(format!("{place}: lanes name different masks"));
            }
            self.perform(lanes.start, together, mask).map_err(|e| format!("{place}: {e}"))?;
            return Ok(true);
        }
        Ok(false)
    }

    fn mask(&self, thread: usize, together: &Together) -> u32 {
        match together {
            Together::Shuffle { mask, .. }
            | Together::Ballot { mask, .. }
            | Together::Sync { mask } => self.get(thread, *mask) as u32,
            Together::Multiply { .. }
            | Together::Matrices { .. }
            | Together::Barrier { .. }
            | Together::ClusterArrive
            | Together::ClusterWait
            | Together::Product(_)
            | Together::WarpgroupFence
            | Together::WarpgroupCommit
            | Together::WarpgroupWait(_) => ALL,
        }
    }

    fn perform(&mut self, first: usize, together: &Together, mask: u32) -> Result<(), String> {
        match together {
            Together::Shuffle { mode, to, is_in_range, value, lane, clamp, .. } => {
                let sources = [*value, *lane, *clamp];
                self.shuffle(first, mask, *mode, (*to, *is_in_range), sources)?;
            }
            Together::Ballot { to, predicate, .. } => {
                let named = (0..LANES).filter(|lane| mask >> lane & 1 != 0);
                let is_set = |lane: &usize| self.get(first + lane, *predicate) != 0;
                let ballot = named.clone().filter(is_set).fold(0, |all, lane| all | 1 << lane);
                named.for_each(|lane| self.set(first + lane, *to, ballot));
            }
            Together::Sync { .. } => (),
            Together::Multiply { to, a, b, c } => self.multiply(first, to, a, b, c),
            Together::Matrices { to, from } => self.matrices(first, to, from)?,
            Together::Product(product) => self.issue_product(first, product)?,
            Together::WarpgroupFence => self.fence_warpgroup(first),
            Together::WarpgroupCommit => self.commit_products(first)?,
            Together::WarpgroupWait(pending) => self.await_products(first, *pending)?,
            Together::Barrier { id, count } => return self.arrive_at_barrier(first, *id, *count),
            Together::ClusterArrive => self.arrive_at_cluster(first)?,
            Together::ClusterWait => return self.wait_for_cluster(first),
        }
        for lane in (0..LANES).filter(|lane| mask >> lane & 1 != 0) {
            self.threads[first + lane].state = State::Ready;
            self.threads[first + lane].next += 1;
        }
        Ok(())
    }

    /// The clamp's low bits bound the lane, its bits from 8 on say which bits of a lane name its segment.
    fn shuffle(
        &mut self,
        first: usize,
        mask: u32,
        mode: Shuffle,
        (to, is_in_range): (Slot, Option<Slot>),
        [value, lane, clamp]: [Source; 3],
    ) -> Result<(), String> {
        let values: Vec<u64> = (0..LANES).map(|lane| self.get(first + lane, value)).collect();
        for own in (0..LANES as i64).filter(|own| mask >> own & 1 != 0) {
            let thread = first + own as usize;
            let by = (self.get(thread, lane) & 31) as i64;
            let clamp = self.get(thread, clamp) as i64;
            let segment = clamp >> 8 & 31;
            let last = own & segment | clamp & 31 & !segment;
            let (from, is_inside) = match mode {
                Shuffle::Up => (own - by, own - by >= last),
                Shuffle::Butterfly => (own ^ by, own ^ by <= last),
                Shuffle::Index => {
                    let from = own & segment | by & !segment;
                    (from, from <= last)
                }
            };
            let from = if is_inside { from } else { own };
            if mask >> from & 1 == 0 {
                return Err(format!("lane {own} reads lane {from}, which is not in {mask:#x}"));
            }
            self.set(thread, to, values[from as usize] & 0xffff_ffff);
            if let Some(slot) = is_in_range {
                self.set(thread, slot, is_inside.into());
            }
        }
        Ok(())
    }

    /// d[16][8] = a[16][16] * b[16][8] + c. Lane 4g + t has of a the rows g (registers 0, 2) and g + 8 (1, 3), at columns
    /// 2t, 2t + 1 (0, 1) and 8 on from there (2, 3); of b the rows 2t, 2t + 1 and 8 on from there, at column g; of c and d
    /// the rows g (0, 1) and g + 8 (2, 3), at columns 2t, 2t + 1. In which order an element's products are summed the
    /// instruction leaves open: here by ascending column of a, each rounded, as in the emulator.
    fn multiply(
        &mut self,
        first: usize,
        to: &[Slot; 4],
        a: &[Source; 4],
        b: &[Source; 2],
        c: &[Source; 4],
    ) {
        let (mut left, mut right, mut sums) = ([[0f32; 16]; 16], [[0f32; 16]; 8], [[0f32; 8]; 16]);
        let half = |word: u64, part: usize| f16::from_bits((word >> (16 * part)) as u16).to_f32();
        for lane in 0..LANES {
            let (group, column) = (lane / 4, lane % 4 * 2);
            for part in 0..2 {
                for (register, source) in a.iter().enumerate() {
                    let (row, at) = (group + register % 2 * 8, column + register / 2 * 8);
                    left[row][at + part] = half(self.get(first + lane, *source), part);
                }
                for (register, source) in b.iter().enumerate() {
                    let value = half(self.get(first + lane, *source), part);
                    right[group][column + register * 8 + part] = value;
                }
            }
            for (register, source) in c.iter().enumerate() {
                let value = f32::from_bits(self.get(first + lane, *source) as u32);
                sums[group + register / 2 * 8][column + register % 2] = value;
            }
        }
        for (row, left) in sums.iter_mut().zip(&left) {
            for k in 0..16 {
                for (sum, right) in row.iter_mut().zip(&right) {
                    *sum += left[k] * right[k];
                }
            }
        }
        for lane in 0..LANES {
            let (group, column) = (lane / 4, lane % 4 * 2);
            for (register, slot) in to.iter().enumerate() {
                let value = sums[group + register / 2 * 8][column + register % 2];
                self.set(first + lane, *slot, value.to_bits().into());
            }
        }
    }

    /// Lane 8m + r names row r of matrix m; register m of lane 4r + t gets elements 2t and 2t + 1 of that row.
    fn matrices(&mut self, first: usize, to: &[Slot; 4], from: &Place) -> Result<(), String> {
        // All addresses first: a register that gets a word may have held one.
        let rows: Vec<u64> = (0..LANES).map(|lane| self.address(first + lane, from)).collect();
        for (at, address) in rows.into_iter().enumerate() {
            let (matrix, row) = (at / 8, at % 8);
            let mut words = [0; 16];
            words.copy_from_slice(self.bytes(first, Space::Shared, address, 16)?);
            for (part, word) in words.as_chunks().0.iter().enumerate() {
                let word = u32::from_le_bytes(*word);
                self.set(first + 4 * row + part, to[matrix], word.into());
            }
        }
        Ok(())
    }

    fn arrive_at_barrier(
        &mut self,
        first: usize,
        id: Source,
        count: Option<Source>,
    ) -> Result<(), String> {
        let of = |cluster: &Self, thread| {
            let all = u64::from(cluster.launch.block);
            (cluster.get(thread, id), count.map_or(all, |count| cluster.get(thread, count)))
        };
        let (id, count) = of(self, first);
        if (first..first + LANES).any(|thread| of(self, thread) != (id, count)) {
            return Err("lanes come to different barriers".into());
        }
        if id > 15 || count == 0 || !count.is_multiple_of(LANES as u64) {
            return Err(format!("barrier {id} of {count} threads"));
        }
        for thread in first..first + LANES {
            self.threads[thread].state = State::Barrier(id, count);
        }
        Ok(())
    }
}
