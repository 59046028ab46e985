//! Tile registers of a processor (AMX): large, so the system saves them for processes only that have asked for it.
#![allow(unsafe_code)]

/// Asks for tile registers, for all threads of this process. Whether it may use them now.
#[cfg(target_arch = "x86_64")]
pub(crate) fn ask_for_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: changes nothing but what instructions this process may run.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}
