//! Every shape of every model on the architecture that has code of its own for each, and most rows on the others. What breaks
//! these alone is a change of the kernels: `scripts/check-kernels` runs them.

use crate::code::{compiler, disassembler};
use crate::{WHOLE, assert_instructions, assert_resources, compile, kernels};
use spec_kernels::ARCHS;

#[test]
fn kernels_of_every_shape_keep_to_their_registers_and_have_no_stack() {
    let Some(compiler) = compiler() else { return };
    assert_resources(&compile(&compiler, kernels::variants(WHOLE), WHOLE));
}

#[test]
fn kernels_of_most_rows_are_made_of_the_instructions_that_they_were_written_for() {
    let Some(compiler) = compiler() else { return };
    let Some(disassembler) = disassembler(&compiler) else { return };
    for arch in ARCHS.into_iter().filter(|arch| *arch != WHOLE) {
        let compiled = compile(&compiler, kernels::fewest_and_most_rows(arch), arch);
        assert_resources(&compiled);
        assert_instructions(&disassembler, &compiled);
    }
}
