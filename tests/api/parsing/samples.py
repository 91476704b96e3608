"""Answers in each format, and what is in them. Expected values are written by hand, not parsed."""

from tests.api.parsing.answers import Calls

Sample = tuple[str, str, Calls]  # text, content, calls

OSLO: Calls = [("weather", {"city": "Oslo"})]
BOTH: Calls = [("weather", {"city": "Oslo", "days": 2}), ("now", {})]

HERMES: dict[str, Sample] = {
    "one": ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', "", OSLO),
    "text before": (
        'Let me <look>.\n\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>\n',
        "Let me <look>.",
        OSLO,
    ),
    "two": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        BOTH,
    ),
    "a list": (
        '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}, {"name": "now"}]</tool_call>',
        "",
        BOTH,
    ),
    "two in a tag": (
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n{"name": "now"}</tool_call>',
        "",
        BOTH,
    ),
    "arguments first": ('<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}', "", OSLO),
    "arguments in a string": (
        '<tool_call>{"type": "function", "name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        "",
        OSLO,
    ),
    "null arguments": ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
    "all of JSON": (
        '<tool_call>{"name": "weather", "arguments": {"a": [1, -2.5e+3, true, false, null, {}, []], '
        '"b": {"c": "\\u00fc\\n\\"</tool_call>\\\\ 東京 🙂"}}}</tool_call> done',
        "done",
        [("weather", {"a": [1, -2500.0, True, False, None, {}, []], "b": {"c": 'ü\n"</tool_call>\\ 東京 🙂'}})],
    ),
    "a line end in a string": (
        '<tool_call>{"name": "weather", "arguments": {"city": "a\n\tb"}}</tool_call>',
        "",
        [("weather", {"city": "a\n\tb"})],
    ),
}
LLAMA3: dict[str, Sample] = {
    "one": ('{"name": "weather", "parameters": {"city": "Oslo"}}', "", OSLO),
    "spaces": (' \n{ "name" : "weather" , "arguments" : {"city": "Oslo"} } \n', "", OSLO),
    "two": ('{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}; {"name": "now"}', "", BOTH),
    "tagged": ('Well. <|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', "Well.", OSLO),
    "text after": ('{"name": "weather", "parameters": {"city": "Oslo"}}\nThere.', "There.", OSLO),
    "type": ('{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}', "", OSLO),
}
MISTRAL: dict[str, Sample] = {
    "a list": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]', "", OSLO),
    "two in a list": (
        'Sure.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}, {"name": "now"}]',
        "Sure.",
        BOTH,
    ),
    "named": ('[TOOL_CALLS]weather{"city": "Oslo"}', "", OSLO),
    "two named": ('[TOOL_CALLS]weather{"city": "Oslo", "days": 2}[TOOL_CALLS]now{}', "", BOTH),
    "with ids": (
        '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo", "days": 2}[TOOL_CALLS]now[ARGS]{}',
        "",
        BOTH,
    ),
    "an object": ('[TOOL_CALLS]{"name": "weather", "arguments": {"city": "Oslo"}}', "", OSLO),
}
PYTHONIC: dict[str, Sample] = {
    "one": ('[weather(city="Oslo")]', "", OSLO),
    "two": ("[weather(city='Oslo', days=2), now()]", "", BOTH),
    "marked": ("Yes: <|python_start|>[weather(city='Oslo')]<|python_end|>", "Yes:", OSLO),
    "all literals": (
        "[weather(a=[1, -2.5, (True, none_)], b={'c': \"it's, (ok)\"}, d=None, e=true, f=null)]".replace(
            "none_", "None"
        ),
        "",
        [
            (
                "weather",
                {"a": [1, -2.5, [True, None]], "b": {"c": "it's, (ok)"}, "d": None, "e": True, "f": None},
            )
        ],
    ),
    "long strings": (
        '[weather(city="""a "b"\n)]""", units=\'\\n\\\'\')]',
        "",
        [("weather", {"city": 'a "b"\n)]', "units": "\n'"})],
    ),
    "text after": ("[now()]\n That's it 🙂", "That's it 🙂", [("now", {})]),
}
LFM2: dict[str, Sample] = {
    "one": ('<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>', "", OSLO),
    "two": ("I look. <|tool_call_start|>[weather(city='Oslo', days=2), now()]<|tool_call_end|>", "I look.", BOTH),
    "text after": ("<|tool_call_start|>[now()]<|tool_call_end|>That's it", "That's it", [("now", {})]),
    "cut off": ("<|tool_call_start|>[weather(city='Oslo')]<|tool_ca", "", OSLO),
}
QWEN3_CODER: dict[str, Sample] = {
    "one": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        "",
        OSLO,
    ),
    "two": (
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I look.",
        BOTH,
    ),
    "no outer tag": ("<function=weather><parameter=city>Oslo</parameter></function></tool_call>", "", OSLO),
    "code": (
        "<tool_call><function=weather><parameter=city>\n\nif a < b:\n    print('\"x\"\\n')\n\n</parameter>"
        "</function></tool_call>",
        "",
        [("weather", {"city": "\nif a < b:\n    print('\"x\"\\n')\n"})],
    ),
    "types": (
        "<tool_call><function=weather><parameter=units>null</parameter><parameter=at>True</parameter>"
        "<parameter=where>{'a': [1, 2]}</parameter><parameter=tags>\n[\"é\", null]\n</parameter>"
        "<parameter=days>two</parameter><parameter=unknown>7</parameter></function></tool_call>",
        "",
        [
            (
                "weather",
                {
                    "units": None,
                    "at": True,
                    "where": {"a": [1, 2]},
                    "tags": ["é", None],
                    "days": "two",
                    "unknown": "7",
                },
            )
        ],
    ),
    "in JSON": ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', "", OSLO),
}
OPENAI: dict[str, Sample] = {
    "one": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        "",
        OSLO,
    ),
    "recipient of the role": (
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}',
        "",
        OSLO,
    ),
    "two": (
        "I look.\n<|channel|>commentary to=functions.weather <|constrain|>json<|message|> "
        '{"city": "Oslo", "days": 2}'
        "<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}\n<|call|>",
        "I look.",
        BOTH,
    ),
    "another channel": (
        "<|channel|>analysis to=functions.now code<|message|>{}<|end|>Done.",
        "Done.",
        [("now", {})],
    ),
}
GEMMA4: dict[str, Sample] = {
    "one": ('<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>', "", OSLO),
    "two": (
        'I look.<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "I look.",
        BOTH,
    ),
    "marks of the format in a string": (
        '<|tool_call>call:weather{city:<|"|>a, {b}: [c] <|"|>d<|"|> <tool_call|>\n<|"|>,days:2}<tool_call|>',
        "",
        [("weather", {"city": 'a, {b}: [c] <|"|>d<|"|> <tool_call|>\n', "days": 2})],
    ),
    "all of it": (
        '<|tool_call>call:weather{city:Oslo, units:null,at:true,where:{a:{b:<|"|>"x"\n<|"|>}},'
        'tags:[<|"|>é<|"|>,-2.5,[],{}],"days":2}<tool_call|>',
        "",
        [
            (
                "weather",
                {
                    "city": "Oslo",
                    "units": None,
                    "at": True,
                    "where": {"a": {"b": '"x"\n'}},
                    "tags": ["é", -2.5, [], {}],
                    "days": 2,
                },
            )
        ],
    ),
    "JSON": ('<|tool_call>call:weather{"city": "Oslo"}<tool_call|>', "", OSLO),
    "after reasoning": ('<channel|>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>', "", OSLO),
    "no mark": ('call:weather{city:<|"|>Oslo<|"|>}<tool_call|>', "", OSLO),
    "no end": ('Well.\n<|tool_call>call:weather{city:<|"|>Oslo<|"|>}', "Well.", OSLO),
}
GLM4: dict[str, Sample] = {
    "one": ('weather\n{"city": "Oslo"}', "", OSLO),
    "two": ('weather\n{"city": "Oslo", "days": 2}\nnow\n{}', "", BOTH),
    "text before": ('I look.<|assistant|>weather\n{"city": "Oslo"}<|observation|>', "I look.", OSLO),
    "text after": ('weather \n{"city": "Oslo"}\nThere.', "There.", OSLO),
}
GRANITE: dict[str, Sample] = {
    "one": ('<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]', "", OSLO),
    "two": (
        'I look.\n<|tool_call|> [{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}, {"name": "now"}]',
        "I look.",
        BOTH,
    ),
    "the other mark": ('<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_call>', "", OSLO),
    "an object": ('<|tool_call|>{"name": "weather", "arguments": {"city": "Oslo"}}', "", OSLO),
}
PHI4_MINI: dict[str, Sample] = {
    "one": ('<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>', "", OSLO),
    "two": (
        'I look.<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}]<|/tool_call|>\n'
        '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>',
        "I look.",
        BOTH,
    ),
    "functools": ('functools[{"name": "weather", "arguments": {"city": "Oslo"}}]', "", OSLO),
}
_MUSE = '<|start|>assistant to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
_MUSE_END = "</atem:invoke>\n</atem:function_calls>"
MUSE_GLIMMER: dict[str, Sample] = {
    "one": (f'{_MUSE}<atem:parameter name="city">Oslo</atem:parameter>\n{_MUSE_END}<|eot|>', "", OSLO),
    "the prompt has the start": (
        ' to=weather<|message|><atem:function_calls><atem:invoke name="weather"><atem:parameter name="city">Oslo'
        f"</atem:parameter>{_MUSE_END}",
        "",
        OSLO,
    ),
    "two in a list": (
        f'I look.\n{_MUSE}<atem:parameter name="city">Oslo</atem:parameter>\n<atem:parameter name="days">2'
        f'</atem:parameter>\n</atem:invoke>\n<atem:invoke name="now">\n{_MUSE_END}<|eom|>',
        "I look.",
        BOTH,
    ),
    "two messages": (
        f'{_MUSE}<atem:parameter name="city">Oslo</atem:parameter>\n<atem:parameter name="days">2'
        f"</atem:parameter>\n{_MUSE_END}<|eom|><|start|>assistant to=now<|message|>"
        f'<atem:function_calls><atem:invoke name="now">{_MUSE_END}<|eot|>',
        "",
        BOTH,
    ),
    "types and spaces": (
        f'{_MUSE}<atem:parameter name="city"> \nif a < b:\n </atem:parameter>'
        '<atem:parameter name="at">true</atem:parameter><atem:parameter name="tags">["é", null]</atem:parameter>'
        f'<atem:parameter name="where">{{"zip": 1}}</atem:parameter>{_MUSE_END}<|eot|>',
        "",
        [("weather", {"city": " \nif a < b:\n ", "at": True, "tags": ["é", None], "where": {"zip": 1}})],
    ),
}
SAMPLES = {
    "gemma4": GEMMA4,
    "glm4": GLM4,
    "granite": GRANITE,
    "phi4_mini_json": PHI4_MINI,
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "muse_glimmer": MUSE_GLIMMER,
    "openai": OPENAI,
    "pythonic": PYTHONIC,
    "lfm2": LFM2,
    "qwen3_coder": QWEN3_CODER,
}
# Texts that are no calls, in any format: all of each is content.
NO_CALLS = {
    "gemma4": (
        "call me",
        "<|tool_call>weather{}<tool_call|>",
        "<|tool_call>call:unknown{}<tool_call|>",
        "a<channel|>b",
        "<|tool_call>call:weather{city}<tool_call|>",
        "<|tool_call>call:weather{<|city|>:1}<tool_call|>",
        "<|tool_call>call:weather {}",
    ),
    "glm4": (
        "weather",
        "weather is fine",
        'weather {"city": "Oslo"}',
        "weather\n[1]",
        "unknown\n{}",
        "now\n{,}",
        "now\n{",
    ),
    "granite": ("<|tool_call|>", "<|tool_call|>[]", "<tool_call>text</tool_call>", '<|tool_call|>[{"name": "x"}]'),
    "phi4_mini_json": (
        "functools.partial",
        'functools {"name": "now"}',
        "functools[]",
        "<|tool_call|>x<|/tool_call|>",
        '<|tool_call|>[{"name": "now"',
    ),
    "hermes": (
        "",
        " \n",
        "no call <tool_cal",
        "<tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'weather'}</tool_call>",
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "weather", "extra": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call><tool_call>\n",
    ),
    "llama3_json": (
        '{"answer": 42}',
        "{",
        '{"name": "unknown", "parameters": {}}',
        "x {}",
        "<|python_tag|>print(1)",
    ),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS] weather", "[TOOL_CALLS]weather[ARGS]x", "[TOOL_CALLS][]", "[1]"),
    "muse_glimmer": (
        "go to=weather",
        '<atem:invoke name="now"></atem:invoke>',
        " to=user<|message|>Yes.",
        f'<|start|>assistant to=unknown<|message|><atem:function_calls><atem:invoke name="unknown">{_MUSE_END}',
        " to=now<|message|>{}",
        " to=now<|message|><atem:function_calls>now</atem:function_calls>",
    ),
    "openai": (
        "<|channel|>",
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "<|channel|>commentary<|message|>I look.",
        "<|channel|>commentary to=browser.search<|message|>{}",
        "<|channel|>commentary to=now<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.unknown<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.now<|message|>[1]<|call|>",
        "<|channel|>commentary to=functions.now {}",
    ),
    "pythonic": (
        "[1, 2]",
        "[weather]",
        "[weather(1)]",
        "[weather(city=oslo)]",
        "[weather(city=f'x')]",
        "[weather(city=-'x')]",
        "[weather(city={1: 2})]",
        "[weather(city=1e999)]",
        "[weather(city='x'",
        "[weather(city=(1]))]",
        "a [now()]",
        "[unknown()]",
    ),
    "lfm2": (
        "[now()]",
        "<|tool_call_start|>[weather(1)]",
        "<|tool_call_start|>[unknown()]<|tool_call_end|>",
    ),
    "qwen3_coder": (
        "<tool_call>text</tool_call>",
        "<function=unknown></function>",
        "<function=weather",
        "<function=weather>oops</function>",
    ),
}
# Calls that are malformed after they have begun: (text, content, the arguments as the model wrote them).
MALFORMED = {
    "hermes": (
        ('<tool_call>{"name": "weather", "arguments": {}, "extra": 1}</tool_call>', "", "{}"),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}</tool_call> then',
            "then",
            '{"city": "Oslo"}',
        ),
        ('<tool_call>{"name": "weather", "arguments": {"a": NaN}}</tool_call>', "", '{"a": NaN}}'),
        ('<tool_call>{"name": "weather", "arguments": {"a": 01}}</tool_call>', "", '{"a": 01}}'),
        ('<tool_call>{"name": "weather", "arguments": {"a": "\\x"}}</tool_call>', "", '{"a": "\\x"}}'),
        ('<tool_call>{"name": "weather", "arguments": {"a": "\\u12"}}</tool_call>', "", '{"a": "\\u12"}}'),
        ('Hm. <tool_call>{"name": "weather", "arguments": {"a": 1,}}</tool_call>', "Hm.", '{"a": 1,}}'),
        ('<tool_call>{"name": "weather", "arguments": {"a": 1}, "why": [1]}</tool_call>', "", '{"a": 1}'),
        ('<tool_call>{"name": "weather", "arguments": {"a": "b</tool_call>', "", '{"a": "b</tool_call>'),
    ),
    "llama3_json": (('{"name": "weather", "parameters": {"city": Oslo}} Yes', "", '{"city": Oslo}} Yes'),),
    "mistral": (('[TOOL_CALLS]weather{"city": Oslo}', "", '{"city": Oslo}'),),
    "muse_glimmer": (
        (
            f'{_MUSE}<atem:parameter name="city">Oslo{_MUSE_END}',
            "",
            '{"city": "Oslo</atem:invoke>\\n</atem:function_calls>',
        ),
    ),
    "openai": (
        ('<|channel|>commentary to=functions.weather<|message|>{"city": "Oslo"<|call|>', "", '{"city": "Oslo"'),
    ),
    "gemma4": (
        ('<|tool_call>call:weather{city:<|"|>Oslo}<tool_call|>', "", '{"city": "Oslo}<tool_call|>'),
        ("<|tool_call>call:weather{tags:[1}]}<tool_call|> Yes", "Yes", '{"tags": [1}]}'),
        ("Hm. <|tool_call>call:weather{days:1,}<tool_call|>", "Hm.", '{"days": 1, }'),
        ('<|tool_call>call:weather{days:1,city<|"|>a<|"|>}', "", '{"days": 1, city<|"|>a<|"|>}'),
        ('<|tool_call>call:weather{days:1 <|"|>a<|"|>}<tool_call|>', "", '{"days": 1<|"|>a<|"|>}'),
        (
            "<|tool_call>call:weather{a:" + "[" * 70 + "]" * 70 + "}<tool_call|>",
            "",
            '{"a": ' + "[" * 70 + "]" * 70 + "}",
        ),
    ),
    "glm4": (('weather\n{"city": Oslo}<|observation|>', "", '{"city": Oslo}'),),
    "granite": (
        (
            '<tool_call>[{"name": "weather", "arguments": {"city": Oslo}}]</tool_call> Yes',
            "Yes",
            '{"city": Oslo}}]',
        ),
    ),
    "phi4_mini_json": (
        ('functools[{"name": "weather", "arguments": {"city": "Oslo"}<|/tool_call|>', "", '{"city": "Oslo"}'),
    ),
    "pythonic": (("<|python_start|>[weather(a=1, b=(1])]<|python_end|> Yes", "Yes", '{"a": 1])]'),),
    "lfm2": (("<|tool_call_start|>[weather(a=1, b=(1])]<|tool_call_end|> Yes", "Yes", '{"a": 1])]'),),
    "qwen3_coder": (("<function=weather><parameter=city>Oslo</function>", "", '{"city": "Oslo</function>'),),
}
