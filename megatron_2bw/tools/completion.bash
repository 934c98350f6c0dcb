# shellcheck shell=bash
_megatron_2bw() {
    if [[ $COMP_CWORD == 1 ]]; then
        mapfile -t COMPREPLY < <(compgen -W "COMMANDS version completion --help" -- "${COMP_WORDS[1]}")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}
complete -o filenames -F _megatron_2bw megatron-2bw
