#pragma once
struct __half { unsigned short bits; };
struct __half2 { unsigned short bits[2]; };
