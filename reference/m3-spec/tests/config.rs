//! Configurations: both schemas, the named models, every refusal.

use m3_spec::config::{AttentionKind, Config, ConfigError, MlpKind};
use serde_json::{Value, json};

const NAMES: [&str; 5] = [
    "minimax-m3",
    "minimax-m3.1-flash",
    "minimax-m3-4layer",
    "tiny",
    "echo",
];

/// A small model in the schema of the release, as a text-only file.
fn released() -> Value {
    Config::tiny().to_released_json()
}

fn native() -> Value {
    Config::tiny().to_native_json()
}

/// The message that `value` is refused with.
fn refusal(value: &Value) -> String {
    Config::from_value(value)
        .expect_err("must be refused")
        .to_string()
}

/// `value` with one entry changed, given by a JSON pointer.
fn with(mut value: Value, pointer: &str, entry: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    value.pointer_mut(parent).unwrap()[key] = entry;
    value
}

fn without(mut value: Value, pointer: &str) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    value
        .pointer_mut(parent)
        .unwrap()
        .as_object_mut()
        .unwrap()
        .remove(key)
        .expect("key exists");
    value
}

#[test]
fn named_models_survive_both_schemas() {
    for name in NAMES {
        let config = Config::named(name).unwrap();
        for written in [config.to_released_json(), config.to_native_json()] {
            assert_eq!(
                Config::from_json(&written.to_string()).unwrap(),
                config,
                "{name}"
            );
        }
    }
    assert_eq!(Config::named("m4"), None);
}

#[test]
fn minimax_m3_has_the_published_layers() {
    let m3 = Config::minimax_m3().text;
    assert_eq!((m3.num_layers(), m3.group_size()), (60, 16));
    assert_eq!(
        m3.sparse_layers().collect::<Vec<_>>(),
        (3..60).collect::<Vec<_>>()
    );
    assert_eq!(
        m3.moe_layers().collect::<Vec<_>>(),
        (3..60).collect::<Vec<_>>()
    );
    assert_eq!(m3.softmax_scale(), 0.088_388_347_648_318_45);
}

#[test]
fn flash_is_sparse_everywhere_and_dense_in_three_mlps() {
    let flash = Config::minimax_m3_1_flash().text;
    assert_eq!(flash.sparse_layers().count(), 60);
    assert_eq!(flash.moe_layers().count(), 57);
    assert_eq!(flash.rope_theta, 1e7);
}

#[test]
fn cutting_layers_0_1_3_4_gives_the_4layer_model() {
    let cut = Config::minimax_m3().cut_layers(&[0, 1, 3, 4]).unwrap();
    assert_eq!(cut, Config::minimax_m3_4layer());
    use AttentionKind::{Full, Sparse};
    use MlpKind::{Dense, Moe};
    assert_eq!(cut.text.attention, [Full, Full, Sparse, Sparse]);
    assert_eq!(cut.text.mlp, [Dense, Dense, Moe, Moe]);
    // In M3.1 the same cut is sparse in all four layers: the lists are independent.
    let flash = Config::minimax_m3_1_flash()
        .cut_layers(&[0, 1, 3, 4])
        .unwrap();
    assert_eq!(flash.text.attention, [Sparse; 4]);
    assert_eq!(flash.text.mlp, [Dense, Dense, Moe, Moe]);
}

#[test]
fn cuts_out_of_range_or_empty_are_refused() {
    let m3 = Config::minimax_m3();
    assert!(
        m3.cut_layers(&[0, 60])
            .unwrap_err()
            .to_string()
            .contains("layer 60")
    );
    assert!(m3.cut_layers(&[]).is_err());
}

#[test]
fn files_written_by_transformers_are_read() {
    let checkpoints = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/checkpoints");
    let read = |name: &str| {
        let json = std::fs::read_to_string(format!("{checkpoints}/{name}/config.json")).unwrap();
        Config::from_json(&json).unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    let mut seen = 0;
    for entry in std::fs::read_dir(checkpoints).unwrap() {
        read(entry.unwrap().file_name().to_str().unwrap());
        seen += 1;
    }
    assert!(seen >= 10);
    let (native, released) = (read("basic"), read("basic-released"));
    assert_eq!(native.vision, released.vision);
    // The released file names no special tokens.
    assert_eq!(
        (native.text.bos_token_id, released.text.bos_token_id),
        (Some(1), None)
    );
    let mut native_text = native.text;
    native_text.bos_token_id = None;
    native_text.eos_token_id = None;
    assert_eq!(native_text, released.text);
}

#[test]
fn absent_vision_fields_take_the_values_of_m3() {
    let mut written = Config::minimax_m3().to_released_json();
    written["vision_config"] = json!({ "hidden_size": 160 });
    let (tower, projector) = Config::from_value(&written).unwrap().vision.unwrap();
    assert_eq!(
        (tower.hidden_size, tower.num_layers, tower.rope_theta),
        (160, 32, 1e4)
    );
    assert_eq!(projector.image_token_id, 200_025);
}

#[test]
fn sections_pick_their_schema_alone() {
    let m3 = Config::minimax_m3();
    let mut mixed = m3.to_released_json();
    mixed["vision_config"] = m3.to_native_json()["vision_config"].clone();
    assert_eq!(Config::from_value(&mixed).unwrap(), m3);
}

#[test]
fn unknown_keys_are_passed_over_and_null_is_absent() {
    let mut value = with(released(), "/num_reward_heads", json!(0));
    value["some_new_key"] = json!({ "deep": [1, 2] });
    value["bos_token_id"] = Value::Null;
    value["sparse_attention_config"]["another"] = json!("x");
    assert_eq!(Config::from_value(&value).unwrap(), Config::tiny());
}

#[test]
fn unknown_model_types_are_refused_by_name() {
    for got in ["qwen3_moe", "minimax_m2", "llama"] {
        let message = refusal(&with(released(), "/model_type", json!(got)));
        assert!(
            message.contains(got) && message.contains("minimax_m3_vl"),
            "{message}"
        );
    }
    let composite = Config::minimax_m3().to_released_json();
    assert!(
        refusal(&with(composite, "/model_type", json!("minimax_m3_vl_text")))
            .contains("model_type")
    );
    let unnamed = without(without(released(), "/model_type"), "/architectures");
    assert!(refusal(&unnamed).contains("missing"));
    let by_class = without(released(), "/model_type");
    assert!(
        Config::from_value(&by_class).is_ok(),
        "the class name is enough"
    );
    assert!(
        refusal(&with(
            by_class,
            "/architectures",
            json!(["LlamaForCausalLM"])
        ))
        .contains("Llama")
    );
}

#[test]
fn wrong_types_are_refused_naming_key_and_value() {
    for (pointer, entry, key) in [
        ("/hidden_size", json!("128"), "hidden_size"),
        ("/hidden_size", json!(128.5), "hidden_size"),
        ("/head_dim", json!(-1), "head_dim"),
        ("/rms_norm_eps", json!([1e-6]), "rms_norm_eps"),
        ("/moe_layer_freq", json!([0, 0, 1, 2]), "moe_layer_freq"),
        ("/use_gemma_norm", json!(1), "use_gemma_norm"),
        (
            "/sparse_attention_config",
            json!(true),
            "sparse_attention_config",
        ),
        (
            "/sparse_attention_config/sparse_block_size",
            json!("16"),
            "sparse_attention_config.sparse_block_size",
        ),
    ] {
        let error = Config::from_value(&with(released(), pointer, entry.clone())).unwrap_err();
        assert!(matches!(error, ConfigError::WrongType { .. }), "{error}");
        assert!(error.to_string().starts_with(key), "{error}");
        assert!(error.to_string().contains(&entry.to_string()), "{error}");
    }
    assert!(matches!(Config::from_json("{"), Err(ConfigError::Json(_))));
    assert!(matches!(
        Config::from_json("[]"),
        Err(ConfigError::WrongType { .. })
    ));
}

#[test]
fn required_keys_are_asked_for_by_name() {
    for pointer in [
        "/vocab_size",
        "/hidden_size",
        "/num_hidden_layers",
        "/head_dim",
        "/rope_theta",
        "/rms_norm_eps",
        "/swiglu_alpha",
        "/swiglu_limit",
        "/dense_intermediate_size",
        "/routed_scaling_factor",
        "/num_experts_per_tok",
        "/shared_intermediate_size",
    ] {
        let message = refusal(&without(released(), pointer));
        assert!(
            message.contains(&pointer[1..]) && message.contains("missing"),
            "{message}"
        );
    }
    let message = refusal(&without(
        released(),
        "/sparse_attention_config/sparse_index_dim",
    ));
    assert!(message.contains("index_head_dim"), "{message}");
}

#[test]
fn a_missing_dispatch_list_is_refused() {
    for (value, key) in [
        (
            without(released(), "/sparse_attention_config/sparse_attention_freq"),
            "sparse_attention_freq",
        ),
        (without(released(), "/moe_layer_freq"), "moe_layer_freq"),
        (without(native(), "/layer_types"), "layer_types"),
        (without(native(), "/mlp_layer_types"), "mlp_layer_types"),
    ] {
        let message = refusal(&value);
        assert!(
            message.contains(key) && message.contains("missing"),
            "{message}"
        );
    }
}

#[test]
fn a_missing_list_is_fine_where_nothing_could_be_in_it() {
    let no_list = without(released(), "/sparse_attention_config/sparse_attention_freq");
    let dense = with(
        no_list,
        "/sparse_attention_config/use_sparse_attention",
        json!(false),
    );
    let text = Config::from_value(&dense).unwrap().text;
    assert_eq!(text.attention, [AttentionKind::Full; 4]);
    let no_experts = with(
        without(released(), "/moe_layer_freq"),
        "/num_local_experts",
        json!(0),
    );
    let text = Config::from_value(&no_experts).unwrap().text;
    assert_eq!((text.mlp, text.moe), (vec![MlpKind::Dense; 4], None));
}

#[test]
fn lists_of_another_length_are_refused_with_both_numbers() {
    let message = refusal(&with(released(), "/moe_layer_freq", json!([0, 0, 1])));
    assert!(message.contains('3') && message.contains('4'), "{message}");
    let message = refusal(&with(native(), "/num_hidden_layers", json!(5)));
    assert!(
        message.contains("layer_types has 4") && message.contains('5'),
        "{message}"
    );
    let message = refusal(&with(
        native(),
        "/layer_types",
        json!(["full_attention", "sliding_attention"]),
    ));
    assert!(message.contains("sliding_attention"), "{message}");
}

#[test]
fn schemas_that_disagree_are_refused_and_agreeing_ones_read() {
    for (key, same, other) in [
        (
            "layer_types",
            Config::tiny().to_native_json()["layer_types"].clone(),
            json!([
                "full_attention",
                "full_attention",
                "full_attention",
                "minimax_m3_sparse"
            ]),
        ),
        (
            "mlp_layer_types",
            Config::tiny().to_native_json()["mlp_layer_types"].clone(),
            json!(["dense", "sparse", "sparse", "sparse"]),
        ),
        ("index_topk_blocks", json!(4), json!(5)),
        ("index_block_size", json!(16), json!(32)),
        (
            "rope_parameters",
            json!({ "rope_theta": 5e6, "partial_rotary_factor": 0.5 }),
            json!({ "rope_theta": 1e7, "partial_rotary_factor": 0.5 }),
        ),
    ] {
        assert_eq!(
            Config::from_value(&with(released(), &format!("/{key}"), same)).unwrap(),
            Config::tiny()
        );
        let error = Config::from_value(&with(released(), &format!("/{key}"), other)).unwrap_err();
        assert!(
            matches!(error, ConfigError::Disagree { .. }),
            "{key}: {error}"
        );
    }
}

#[test]
fn index_heads_must_equal_kv_heads() {
    let message = refusal(&with(
        released(),
        "/sparse_attention_config/sparse_num_index_heads",
        json!(2),
    ));
    assert!(
        message.contains("index heads 2") && message.contains("num_key_value_heads 4"),
        "{message}"
    );
}

#[test]
fn a_score_type_other_than_max_is_refused() {
    let message = refusal(&with(
        released(),
        "/sparse_attention_config/sparse_score_type",
        json!("lse"),
    ));
    assert!(
        message.contains("lse") && message.contains("max"),
        "{message}"
    );
}

#[test]
fn an_enabled_index_value_is_refused_in_sparse_layers_only() {
    let pointer = "/sparse_attention_config/sparse_disable_index_value";
    let message = refusal(&with(released(), pointer, json!([0, 1, 0, 0])));
    assert!(
        message.contains("[3]") && message.contains("is 0"),
        "{message}"
    );
    assert!(Config::from_value(&with(released(), pointer, json!([1, 1, 0, 1]))).is_ok());
    assert!(refusal(&with(released(), pointer, json!([1, 1]))).contains("missing"));
}

#[test]
fn fewer_slots_than_forced_blocks_are_refused() {
    let value = with(
        released(),
        "/sparse_attention_config/sparse_init_block",
        json!(4),
    );
    let message = refusal(&value);
    assert!(
        message.contains("blocks 4") && message.contains("init blocks 4 + local blocks 1"),
        "{message}"
    );
    let fits = with(
        released(),
        "/sparse_attention_config/sparse_init_block",
        json!(3),
    );
    assert_eq!(
        Config::from_value(&fits)
            .unwrap()
            .text
            .index
            .unwrap()
            .init_blocks,
        3
    );
}

#[test]
fn rotary_dim_must_be_the_factor_times_head_dim() {
    let message = refusal(&with(released(), "/rotary_dim", json!(32)));
    assert!(
        message.contains("rotary_dim 32")
            && message.contains("0.5")
            && message.contains("head_dim 32"),
        "{message}"
    );
    for pointer in ["/rotary_dim", "/partial_rotary_factor"] {
        assert_eq!(
            Config::from_value(&without(released(), pointer)).unwrap(),
            Config::tiny(),
            "one is enough"
        );
    }
    // Without a factor transformers rotates whole heads, whatever rotary_dim says.
    let message = refusal(&without(native(), "/rope_parameters/partial_rotary_factor"));
    assert!(message.contains("transformers takes 1"), "{message}");
    let odd = with(
        without(released(), "/partial_rotary_factor"),
        "/rotary_dim",
        json!(15),
    );
    assert!(refusal(&odd).contains("15"));
}

#[test]
fn heads_must_divide() {
    let message = refusal(&with(released(), "/num_attention_heads", json!(18)));
    assert!(message.contains("18") && message.contains('4'), "{message}");
    let vision = with(
        Config::minimax_m3().to_native_json(),
        "/vision_config/num_attention_heads",
        json!(7),
    );
    assert!(refusal(&vision).contains("1280"));
}

#[test]
fn variants_that_nobody_implements_are_refused() {
    for (key, entry) in [
        ("use_gemma_norm", json!(false)),
        ("use_qk_norm", json!(false)),
        ("qk_norm_type", json!("per_layer")),
        ("scoring_func", json!("softmax")),
        ("use_routing_bias", json!(false)),
        ("attention_output_gate", json!(true)),
        ("tie_word_embeddings", json!(true)),
        ("n_shared_experts", json!(2)),
        ("hidden_act", json!("gelu")),
        ("swiglu_beta", json!(0.5)),
        ("attention_dropout", json!(0.1)),
        ("rope_scaling", json!({ "rope_type": "yarn" })),
    ] {
        let error = Config::from_value(&with(released(), &format!("/{key}"), entry)).unwrap_err();
        assert!(
            matches!(error, ConfigError::Unsupported { .. }),
            "{key}: {error}"
        );
        assert!(error.to_string().contains(key), "{error}");
    }
    let message = refusal(&with(native(), "/rope_parameters/rope_type", json!("yarn")));
    assert!(message.contains("yarn"), "{message}");
}

#[test]
fn more_experts_per_token_than_experts_are_refused() {
    let message = refusal(&with(released(), "/num_experts_per_tok", json!(9)));
    assert!(message.contains('9') && message.contains('8'), "{message}");
}

#[test]
fn absurd_sizes_are_refused_with_their_bound() {
    for (pointer, size, expected) in [
        (
            "/hidden_size",
            1u64 << 40,
            "hidden_size 1099511627776 exceeds 2147483647",
        ),
        (
            "/head_dim",
            1 << 63,
            "head_dim 9223372036854775808 exceeds 2147483647",
        ),
        (
            "/num_local_experts",
            4097,
            "num_local_experts 4097 exceeds 4096",
        ),
        (
            "/intermediate_size",
            1 << 40,
            "intermediate_size 1099511627776 exceeds 2147483647",
        ),
        (
            "/sparse_attention_config/sparse_local_block",
            u64::MAX,
            "local blocks 18446744073709551615 exceeds 2147483647",
        ),
    ] {
        let mut config = released();
        // The rotated dims are a share of head_dim, and would disagree first.
        config
            .as_object_mut()
            .unwrap()
            .remove("partial_rotary_factor");
        assert_eq!(refusal(&with(config, pointer, json!(size))), expected);
    }
    let mut config = Config::minimax_m3().to_released_json();
    config["vision_config"]["spatial_merge_size"] = json!(1025);
    config["vision_config"]
        .as_object_mut()
        .unwrap()
        .remove("img_token_compression_config");
    assert_eq!(
        refusal(&config),
        "vision_config.spatial_merge_size 1025 exceeds 1024"
    );
}
