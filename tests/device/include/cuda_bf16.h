#pragma once
struct __nv_bfloat16 { unsigned short bits; };
struct __nv_bfloat162 { unsigned short bits[2]; };
