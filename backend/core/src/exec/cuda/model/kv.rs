//! The room of the key and value cache on a GPU. A page of a layer is `[kv_head][K | V]`: keys are
//! `[position][element]`, values `[element][position]`, without padding.

use crate::model::{Dtype, ModelConfig};
use crate::pages::PAGE_TOKENS;

/// Bytes of a page over all layers.
pub(crate) const fn page_bytes(kv: Dtype, model: &ModelConfig) -> usize {
    model.num_layers * model.num_kv_heads * 2 * PAGE_TOKENS * model.head_dim * kv.bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::small_llama;

    #[test]
    fn a_page_holds_16_keys_and_values_of_every_head_and_layer() {
        // 3 layers, 2 key heads of 64.
        assert_eq!(page_bytes(Dtype::Fp16, &small_llama()), 3 * 2 * (16 * 64 + 64 * 16) * 2);
        assert_eq!(page_bytes(Dtype::Fp8, &small_llama()), 3 * 2 * (16 * 64 + 64 * 16));
    }
}
