//! Instructions that compute one value of up to three: what each does to bits. Floats round to nearest; a result that is
//! no number is the one that a GPU gives. `mul` and `add` without `.rn` may be fused by an assembler; here they are not.

use std::cmp::Ordering::{self, Equal, Greater, Less};

use half::f16;

use crate::number;

fn u(bits: u64) -> u32 {
    bits as u32
}

fn i(bits: u64) -> i32 {
    bits as i32
}

fn word(value: u32) -> u64 {
    value.into()
}

fn f(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn d(bits: u64) -> f64 {
    f64::from_bits(bits)
}

fn h(bits: u64) -> f32 {
    f16::from_bits(bits as u16).to_f32()
}

fn single(value: f32) -> u64 {
    if value.is_nan() { 0x7fff_ffff } else { value.to_bits().into() }
}

fn double(value: f64) -> u64 {
    if value.is_nan() { 0x7fff_ffff_ffff_ffff } else { value.to_bits() }
}

/// Instructions of one operand.
pub(crate) fn one(opcode: &str) -> Option<fn(u64) -> u64> {
    Some(match opcode {
        "mov.pred" => |a| u64::from(a != 0),
        "mov.u16" | "mov.b16" | "cvt.u16.u32" | "cvt.u32.u16" | "cvt.u64.u16" | "cvt.u16.u64" => {
            |a| a & 0xffff
        }
        "mov.u32" | "mov.b32" | "mov.f32" | "cvt.u64.u32" | "cvt.u32.u64" => |a| word(u(a)),
        "mov.u64" | "mov.b64" | "mov.f64" | "cvta.to.global.u64" => |a| a,
        "not.pred" => |a| a ^ 1,
        "not.b32" => |a| word(!u(a)),
        "not.b64" => |a| !a,
        "neg.s32" => |a| word(u(a).wrapping_neg()),
        "neg.f32" => |a| single(-f(a)),
        "neg.f64" => |a| double(-d(a)),
        "abs.f32" => |a| single(f(a).abs()),
        "abs.f64" => |a| double(d(a).abs()),
        "clz.b32" => |a| word(u(a).leading_zeros()),
        "popc.b32" => |a| word(u(a).count_ones()),
        "popc.b64" => |a| word(a.count_ones()),
        "sqrt.rn.f32" => |a| single(f(a).sqrt()),
        "rcp.rn.f32" => |a| single(1.0 / f(a)),
        "rcp.rn.f64" => |a| double(1.0 / d(a)),
        "rcp.approx.ftz.f64" => |a| number::rough_reciprocal(a),
        "rcp.approx.ftz.f32" => |a| single(number::near_reciprocal(f(a))),
        "ex2.approx.ftz.f32" => |a| single(number::power_of_two(f(a))),
        "cvt.rn.f32.u32" => |a| single(u(a) as f32),
        "cvt.rn.f64.u32" => |a| double(u(a).into()),
        "cvt.rn.f64.u64" => |a| double(a as f64),
        "cvt.rzi.u64.f64" => |a| d(a) as u64,
        "cvt.f64.f32" => |a| double(f(a).into()),
        "cvt.rn.f32.f64" => |a| single(d(a) as f32),
        "cvt.f32.f16" => |a| single(h(a)),
        "cvt.rn.f16.f32" => |a| number::half(f(a)).into(),
        "cvt.rn.f16x2.e4m3x2" => |a| {
            let [low, high] = (a as u16).to_le_bytes().map(number::e4m3_to_half);
            word(u32::from(low) | u32::from(high) << 16)
        },
        _ => return None,
    })
}

/// Instructions of two operands.
pub(crate) fn two(opcode: &str) -> Option<fn(u64, u64) -> u64> {
    if let Some(condition) = opcode.strip_prefix("setp.") {
        return compare(condition);
    }
    Some(match opcode {
        "add.s32" | "add.u32" => |a, b| word(u(a).wrapping_add(u(b))),
        "add.s64" | "add.u64" => |a, b| a.wrapping_add(b),
        "sub.s32" => |a, b| word(u(a).wrapping_sub(u(b))),
        "sub.s64" => |a, b| a.wrapping_sub(b),
        "mul.lo.s32" | "mul.lo.u32" => |a, b| word(u(a).wrapping_mul(u(b))),
        "mul.lo.s64" => |a, b| a.wrapping_mul(b),
        "mul.hi.u32" => |a, b| (word(u(a)) * word(u(b))) >> 32,
        "mul.wide.u32" => |a, b| word(u(a)) * word(u(b)),
        "mul.wide.u16" => |a, b| (a & 0xffff) * (b & 0xffff),
        // What a division by zero gives is left open.
        "div.u32" => |a, b| word(u(a).checked_div(u(b)).unwrap_or(u32::MAX)),
        "div.u64" => |a, b| a.checked_div(b).unwrap_or(u64::MAX),
        "rem.u32" => |a, b| word(u(a).checked_rem(u(b)).unwrap_or(u32::MAX)),
        "min.u32" => |a, b| word(u(a).min(u(b))),
        "max.u32" => |a, b| word(u(a).max(u(b))),
        "and.pred" | "and.b64" => |a, b| a & b,
        "and.b16" => |a, b| a & b & 0xffff,
        "and.b32" => |a, b| word(u(a) & u(b)),
        "or.pred" | "or.b64" => |a, b| a | b,
        "or.b16" => |a, b| (a | b) & 0xffff,
        "or.b32" => |a, b| word(u(a) | u(b)),
        "xor.pred" | "xor.b64" => |a, b| a ^ b,
        "xor.b32" => |a, b| word(u(a) ^ u(b)),
        // What is shifted out is gone.
        "shl.b32" => |a, b| word(u(a).checked_shl(u(b)).unwrap_or(0)),
        "shl.b64" => |a, b| a.checked_shl(u(b)).unwrap_or(0),
        "shr.u32" => |a, b| word(u(a).checked_shr(u(b)).unwrap_or(0)),
        "shr.u64" => |a, b| a.checked_shr(u(b)).unwrap_or(0),
        "shr.s32" => |a, b| (i(a) >> u(b).min(31)) as u32 as u64,
        "add.f32" | "add.rn.f32" => |a, b| single(f(a) + f(b)),
        "sub.f32" | "sub.rn.f32" => |a, b| single(f(a) - f(b)),
        "mul.f32" | "mul.rn.f32" => |a, b| single(f(a) * f(b)),
        "div.rn.f32" => |a, b| single(f(a) / f(b)),
        // A number beside what is none; a zero below another is the negative one.
        "max.f32" => |a, b| single(number::larger(f(a), f(b))),
        "min.f32" => |a, b| single(-number::larger(-f(a), -f(b))),
        "add.f64" | "add.rn.f64" => |a, b| double(d(a) + d(b)),
        "sub.f64" | "sub.rn.f64" => |a, b| double(d(a) - d(b)),
        "mul.f64" | "mul.rn.f64" => |a, b| double(d(a) * d(b)),
        "div.rn.f64" => |a, b| double(d(a) / d(b)),
        "mul.rn.f16x2" => |a, b| {
            let low = number::half(h(a) * h(b));
            let high = number::half(h(a >> 16) * h(b >> 16));
            word(u32::from(low) | u32::from(high) << 16)
        },
        // The first operand is the upper byte.
        "cvt.rn.satfinite.e4m3x2.f32" => {
            |a, b| u16::from_be_bytes([number::e4m3(f(a)), number::e4m3(f(b))]).into()
        }
        _ => return None,
    })
}

fn order(a: f64, b: f64) -> Option<Ordering> {
    a.partial_cmp(&b)
}

/// Comparisons: `lt` and the like are false where one is no number, `ltu` and the like are true.
fn compare(condition: &str) -> Option<fn(u64, u64) -> u64> {
    Some(match condition {
        "eq.s16" | "eq.u16" | "eq.b16" => |a, b| (a as u16 == b as u16).into(),
        "ne.s16" | "ne.u16" | "ne.b16" => |a, b| (a as u16 != b as u16).into(),
        "eq.s32" | "eq.u32" | "eq.b32" => |a, b| (u(a) == u(b)).into(),
        "ne.s32" | "ne.u32" | "ne.b32" => |a, b| (u(a) != u(b)).into(),
        "eq.s64" | "eq.u64" | "eq.b64" => |a, b| (a == b).into(),
        "ne.s64" | "ne.u64" | "ne.b64" => |a, b| (a != b).into(),
        "lt.s32" => |a, b| (i(a) < i(b)).into(),
        "gt.s32" => |a, b| (i(a) > i(b)).into(),
        "lt.u32" => |a, b| (u(a) < u(b)).into(),
        "le.u32" => |a, b| (u(a) <= u(b)).into(),
        "gt.u32" => |a, b| (u(a) > u(b)).into(),
        "ge.u32" => |a, b| (u(a) >= u(b)).into(),
        "lt.u64" => |a, b| (a < b).into(),
        "le.u64" => |a, b| (a <= b).into(),
        "gt.u64" => |a, b| (a > b).into(),
        "ge.u64" => |a, b| (a >= b).into(),
        "eq.f32" => |a, b| (f(a) == f(b)).into(),
        "lt.f32" => |a, b| (f(a) < f(b)).into(),
        "le.f32" => |a, b| (f(a) <= f(b)).into(),
        "gt.f32" => |a, b| (f(a) > f(b)).into(),
        "ge.f32" => |a, b| (f(a) >= f(b)).into(),
        "equ.f32" => {
            |a, b| u64::from(matches!(order(f(a).into(), f(b).into()), None | Some(Equal)))
        }
        "neu.f32" => |a, b| (f(a) != f(b)).into(),
        "ltu.f32" => {
            |a, b| u64::from(!matches!(order(f(a).into(), f(b).into()), Some(Equal | Greater)))
        }
        "leu.f32" => |a, b| u64::from(order(f(a).into(), f(b).into()) != Some(Greater)),
        "gtu.f32" => {
            |a, b| u64::from(!matches!(order(f(a).into(), f(b).into()), Some(Equal | Less)))
        }
        "geu.f32" => |a, b| u64::from(order(f(a).into(), f(b).into()) != Some(Less)),
        "eq.f64" => |a, b| (d(a) == d(b)).into(),
        "lt.f64" => |a, b| (d(a) < d(b)).into(),
        "gt.f64" => |a, b| (d(a) > d(b)).into(),
        "ge.f64" => |a, b| (d(a) >= d(b)).into(),
        "neu.f64" => |a, b| (d(a) != d(b)).into(),
        "ltu.f64" => |a, b| u64::from(!matches!(order(d(a), d(b)), Some(Equal | Greater))),
        "leu.f64" => |a, b| u64::from(order(d(a), d(b)) != Some(Greater)),
        _ => return None,
    })
}

/// Instructions of three operands.
pub(crate) fn three(opcode: &str) -> Option<fn(u64, u64, u64) -> u64> {
    Some(match opcode {
        "mad.lo.s32" => |a, b, c| word(u(a).wrapping_mul(u(b)).wrapping_add(u(c))),
        "mad.lo.s64" => |a, b, c| a.wrapping_mul(b).wrapping_add(c),
        "fma.rn.f32" => |a, b, c| single(f(a).mul_add(f(b), f(c))),
        "fma.rn.f64" => |a, b, c| double(d(a).mul_add(d(b), d(c))),
        "selp.u16" | "selp.b16" | "selp.s16" => |a, b, p| (if p != 0 { a } else { b }) & 0xffff,
        "selp.u32" | "selp.b32" | "selp.s32" | "selp.f32" => {
            |a, b, p| word(u(if p != 0 { a } else { b }))
        }
        "selp.u64" | "selp.b64" | "selp.s64" | "selp.f64" => |a, b, p| if p != 0 { a } else { b },
        "prmt.b32" => |a, b, c| word(number::permute(u(a), u(b), u(c))),
        "shf.l.wrap.b32" => |low, high, by| ((high << 32 | word(u(low))) << (by & 31)) >> 32,
        _ => return None,
    })
}

/// What an atomic instruction leaves in memory.
pub(crate) fn update(name: &str) -> Option<fn(u32, u32) -> u32> {
    Some(match name {
        "add.u32" => u32::wrapping_add,
        "max.u32" => |a, b| a.max(b),
        "or.b32" => |a, b| a | b,
        _ => return None,
    })
}
