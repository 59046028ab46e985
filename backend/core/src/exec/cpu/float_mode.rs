//! How a thread rounds, and that it computes with denormal numbers: by default, which Rust relies on. A library that was linked
//! with `-ffast-math` changes that in the thread that loads it, from which others inherit it, and then results depend on
//! which libraries a server has loaded.
#![allow(unsafe_code)]

use std::marker::PhantomData;

/// The control register of SSE where nothing has changed it: rounds to nearest, keeps denormal numbers, traps nothing.
const DEFAULT: u32 = 0x1f80;

/// The calling thread computes by default as long as this lives.
pub(crate) struct FloatMode {
    before: u32,
    /// Of one thread.
    _here: PhantomData<*const ()>,
}

impl FloatMode {
    pub(crate) fn enter() -> Self {
        let before = control();
        set_control(DEFAULT);
        Self { before, _here: PhantomData }
    }
}

impl Drop for FloatMode {
    fn drop(&mut self) {
        set_control(self.before);
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn control() -> u32 {
    let mut control = 0u32;
    // SAFETY: it stores 4 bytes where they belong.
    unsafe {
        std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack, preserves_flags));
    }
    control
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn set_control(control: u32) {
    // SAFETY: it reads 4 bytes; they are the default, or what the register had before.
    unsafe {
        std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack, readonly, preserves_flags));
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn control() -> u32 {
    DEFAULT
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn set_control(_control: u32) {}

#[cfg(all(test, target_arch = "x86_64", not(miri)))]
mod tests {
    use super::*;
    use crate::exec::Pool;
    use std::hint::black_box;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Denormal numbers are 0, as operands and as results.
    const FAST: u32 = DEFAULT | 0x8040;

    fn keeps_denormals() -> bool {
        black_box(1e-40f32) * black_box(1.0) != 0.0 && black_box(1e-30f32) * black_box(1e-10) != 0.0
    }

    #[test]
    fn a_thread_computes_by_default_and_then_as_before() {
        set_control(FAST);
        assert!(!keeps_denormals());
        let mode = FloatMode::enter();
        assert!(keeps_denormals());
        drop(mode);
        assert!(!keeps_denormals());
        set_control(DEFAULT);
    }

    #[test]
    fn workers_compute_by_default_whoever_starts_them() {
        set_control(FAST);
        let pool = Pool::new(3);
        let num_keeping = AtomicUsize::new(0);
        pool.run(|worker| {
            num_keeping.fetch_add(usize::from(worker > 0 && keeps_denormals()), Ordering::Relaxed);
        });
        set_control(DEFAULT);
        assert_eq!(num_keeping.into_inner(), 2);
    }
}
